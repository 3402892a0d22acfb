"""Texts of records, which anyone may have written, made harmless for the place where they are shown.

Every form of output has its one function here, and whatever writes that form calls it.
"""

import re
import unicodedata

import pandas as pd
from rich.markup import escape as rich_escape

# What is longer is no name and no remark; the record has the whole text.
_MOST_CHARACTERS = 2000
_MOST_IN_A_FIGURE = 60
# Control, format (among them those that turn the direction of writing), surrogate, private and unassigned characters,
# and the two that end a line or a paragraph.
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}
# Left alone is what means nothing in Markdown: a line inside a word, a tilde before a number or a space, a star before
# a space, brackets without an address behind them.
_MARKDOWN = re.compile(
    r"[\\`|$]|\*(?=\S)|\](?=[(\[])|~(?=[^\d\s])|(?<=[^\s(])~|(?<![^\W_])_|_(?![^\W_])|(?<=[a-z]):(?=//)"
)
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def printable(text: object, most: int = _MOST_CHARACTERS) -> str:
    """One line without anything that cannot be seen: such signs become a question mark in a box, line ends a space."""
    words = " ".join(str(text)[: most + 1].split())
    shown = words if len(words) <= most else f"{words[:most]}..."
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join("\N{REPLACEMENT CHARACTER}" if unicodedata.category(sign) in _UNSEEN else sign for sign in shown)


def for_markdown(text: object) -> str:
    """Text in a Markdown paragraph, heading or cell: no markup, no HTML, no end of a cell, no link."""
    plain = "".join(_HTML.get(sign, sign) for sign in printable(text))
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", plain)


def for_latex(text: object) -> str:
    """Text in LaTeX's text mode."""
    return "".join(_LATEX.get(sign, sign) for sign in printable(text))


def for_terminal(text: object) -> str:
    """Text on the terminal, also where rich would read markup."""
    return rich_escape(printable(text))


def for_figure(text: object, most: int = _MOST_IN_A_FIGURE) -> str:
    """Text in a figure: short, no formula; matplotlib leaves series out of the legend whose name begins with a line."""
    shown = printable(text, most).replace("$", r"\$")
    return f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown


def frame_for_figure(table: pd.DataFrame) -> pd.DataFrame:
    """A frame whose texts go into a figure."""
    return table.map(lambda value: for_figure(value) if isinstance(value, str) else value)


def printable_frame(table: pd.DataFrame) -> pd.DataFrame:
    """A frame for a data file: texts printable; where a column mixes texts, numbers and flags, all become texts."""
    return table.apply(_printable_column)


def _printable_column(values: pd.Series) -> pd.Series:
    kinds = set() if pd.api.types.is_numeric_dtype(values) else {_kind(value) for value in values} - {None}
    if not kinds or (len(kinds) == 1 and str not in kinds):
        return values
    return values.map(lambda value: printable(value) if _kind(value) else None)


def _kind(value: object) -> type | None:
    if value is None or value != value:
        return None
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)
