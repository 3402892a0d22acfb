"""Tables in the width of a terminal: split into several beside the same first columns, and never a digit cut off."""

import pandas as pd

from experiments.reporting.files import is_text

# Blanks between two columns: one of each cell's padding and one of the box.
GAP = 2
# Words longer than this are broken: no number is.
_LONGEST_WORD = 40


def bands(texts: pd.DataFrame, width: int) -> list[pd.DataFrame]:
    """`texts` as one frame, or as several that are at most `width` wide, each with the columns that name a row.

    Those are the first ones up to the first column of words. A column that is wider alone has a frame of its own.
    """
    keys = _naming(list(texts.columns))
    least = {name: _least(name, texts.iloc[:, place]) + GAP for place, name in enumerate(texts.columns)}
    room = width + GAP - sum(least[name] for name in keys)
    groups: list[list[str]] = [[]]
    for name in texts.columns[len(keys) :]:
        if groups[-1] and sum(least[other] for other in [*groups[-1], name]) > room:
            groups.append([])
        groups[-1].append(name)
    return [texts[[*keys, *group]] for group in groups]


def column_widths(band: pd.DataFrame, width: int) -> list[int]:
    """Characters for each column of a band: what it needs, and what is left for those that want little more."""
    columns = [(name, band.iloc[:, place]) for place, name in enumerate(band.columns)]
    widths = [_least(name, cells) for name, cells in columns]
    left = width - sum(widths) - GAP * (len(widths) - 1)
    wanted = [_most(name, cells) - least for (name, cells), least in zip(columns, widths, strict=True)]
    for place in sorted(range(len(widths)), key=wanted.__getitem__):
        more = max(0, min(wanted[place], left))
        widths[place] += more
        left -= more
    return widths


def _least(name: str, cells: pd.Series) -> int:
    """The longest word, or line of a list of names and numbers."""
    pieces = [piece for cell in cells for line in two_a_line(cell).split("\n") for piece in _unbroken(line)]
    return max(map(len, [*name.split(), *pieces]), default=1)


def _most(name: str, cells: pd.Series) -> int:
    return max(map(len, [name, *(line for cell in cells for line in two_a_line(cell).split("\n"))]))


def two_a_line(cell: str) -> str:
    """A list of names and numbers broken after every second comma, so that no name loses its number."""
    items = cell.split(", ")
    return ",\n".join(", ".join(items[start : start + 2]) for start in range(0, len(items), 2))


def _naming(names: list[str]) -> list[str]:
    last = next((place for place, name in enumerate(names) if is_text(name)), 0)
    return names[: last + 1]


def _unbroken(line: str) -> list[str]:
    """A line of a list stays whole; other lines break between words, and words that are no numbers anywhere."""
    if ", " in line or line.endswith(","):
        return [line] if len(line) <= _LONGEST_WORD else line.split()
    return [word if any(map(str.isdigit, word)) else word[:_LONGEST_WORD] for word in line.split()]
