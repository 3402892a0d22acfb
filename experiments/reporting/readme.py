"""The README's tables, taken from a report's Markdown and never typed."""

import re
from pathlib import Path

# Everything between the two marks belongs to the report.
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(text: str, folder: Path) -> str:
    """`text` with each marked block replaced by the table of that name in `folder`, one heading level lower."""

    def block(match: re.Match[str]) -> str:
        table = (folder / f"{match[2]}.md").read_text(encoding="utf-8").partition("\n")[2].strip()
        return f"{match[1]}{table.replace('## ', '#### ')}\n{match[3]}"

    return _BLOCK.sub(block, text)
