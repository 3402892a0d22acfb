"""The README's tables, taken from a report's Markdown and never typed."""

import re
from pathlib import Path

# Everything between the two marks belongs to the report.
_BLOCK = re.compile(r"(<!-- table: (\w+)/(\w+)(?:, (.+?))? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def with_tables(text: str, results: Path) -> str:
    """`text` with each marked block replaced by a table of a report, its headings lower.

    The mark `table: cpu/ruler` stands for `cpu/tables/ruler.md` in the folder `results`; words behind a comma choose
    the parts that have them in their heading. The block stays as it is if there is no such report.
    """

    def block(match: re.Match[str]) -> str:
        path = results / match[2] / "tables" / f"{match[3]}.md"
        if not path.is_file():
            return match[0]
        caption, *parts = path.read_text(encoding="utf-8").partition("\n")[2].rstrip().split("\n## ")
        chosen = [part for part in parts if (match[4] or "") in part.partition("\n")[0]]
        return match[1] + "\n#### ".join([caption, *chosen]).lstrip("\n") + f"\n{match[5]}"

    return _BLOCK.sub(block, text)
