"""Measuring harness: typed records, the environment they were made in, and points that are run once."""
