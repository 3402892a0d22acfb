"""The README's tables, taken from a report's Markdown and never typed."""

import re
from pathlib import Path

# Everything between the two marks belongs to the report.
_BLOCK = re.compile(r"(<!-- table: (\w+)/(\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(text: str, results: Path) -> str:
    """`text` with each marked block replaced by a table of a report, its headings lower.

    The mark `table: cpu/ruler` stands for `cpu/tables/ruler.md` in the folder `results`; the block stays as it is if
    there is no such report.
    """

    def block(match: re.Match[str]) -> str:
        path = results / match[2] / "tables" / f"{match[3]}.md"
        if not path.is_file():
            return match[0]
        table = path.read_text(encoding="utf-8").partition("\n")[2].strip()
        return f"{match[1]}{table.replace('## ', '#### ')}\n{match[4]}"

    return _BLOCK.sub(block, text)
