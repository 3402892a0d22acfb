"""One table in four forms: tidy numbers as CSV and Parquet, and what is read as Markdown and LaTeX."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.reporting.escape import for_latex, for_markdown, printable_frame

# Columns of words; all others are numbers.
_LEFT = (
    *("prompt", "variant", "kernel", "method", "speculation", "task", "model", "category", "case", "accuracy_of"),
    *("outcome", "selection", "host KV", "GPU GiB by category", "kind", "record", "reason", "output", "files"),
)


@dataclass(frozen=True)
class Part:
    """One printed table."""

    title: str
    texts: pd.DataFrame


def write_files(
    stem: Path, name: str, numbers: pd.DataFrame, chunks: list[tuple[str, list[Part]]], nothing: str = ""
) -> list[Path]:
    """Write all four forms beside each other; `chunks` are captions with their tables, `nothing` stands for none."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    csv, parquet, markdown, latex = paths = table_paths(stem)
    # Converted: a column of whole numbers stays one where some cells are empty.
    tidy = printable_frame(numbers.reset_index(drop=True)).convert_dtypes()
    csv.write_text(tidy.to_csv(index=False, lineterminator="\n"), encoding="utf-8")
    tidy.to_parquet(parquet, index=False)
    body = "\n\n".join(_markdown(caption, tables) for caption, tables in chunks) or nothing
    markdown.write_text(f"# {name}\n\n{body}\n", encoding="utf-8")
    body = "\n".join(as_latex(part, caption) for caption, tables in chunks for part in tables) or f"% {nothing}\n"
    latex.write_text(body, encoding="utf-8")
    return paths


def table_paths(stem: Path) -> list[Path]:
    """The four files of a table."""
    return [stem.parent / f"{stem.name}{suffix}" for suffix in (".csv", ".parquet", ".md", ".tex")]


def is_text(column: str) -> bool:
    """Whether a column of texts reads from the left; numbers end at the right."""
    return column in _LEFT


def as_markdown(texts: pd.DataFrame) -> str:
    """A Markdown table of a frame of texts."""
    rule = ["---" if is_text(name) else "---:" for name in texts.columns]
    cells = [[for_markdown(cell) for cell in line] for line in [list(texts.columns), *texts.to_numpy().tolist()]]
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_latex(part: Part, caption: str) -> str:
    """A LaTeX table (package booktabs) of a frame of texts."""
    columns = "".join("l" if is_text(name) else "r" for name in part.texts.columns)
    lines = [" & ".join(for_latex(cell) for cell in line) + r" \\" for line in part.texts.to_numpy().tolist()]
    head = " & ".join(for_latex(name) for name in part.texts.columns) + r" \\"
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{for_latex(part.title)}. {for_latex(caption)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            *(r"\toprule", head, r"\midrule", *lines, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _markdown(caption: str, tables: list[Part]) -> str:
    return "\n\n".join(
        [for_markdown(caption), *(f"## {for_markdown(part.title)}\n\n{as_markdown(part.texts)}" for part in tables)]
    )
