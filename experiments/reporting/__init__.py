"""From records to tables and figures; nothing here measures."""
