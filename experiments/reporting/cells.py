"""From numbers to texts: order of rows, names, and cells of tables."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import numpy as np
import pandas as pd

Item = TypeVar("Item")

# What a reader looks for first; all others follow by name.
ORDERS = {
    "method": (
        *("ideal", "full_kv", "dualdecoder", "full_offload", "shadowkv", "specache", "oasiskv", "infinigen", "quest"),
        *("h2o", "streaming_llm"),
    ),
    "speculation": ("self", "random_first", "random"),
    "cache": ("last set", "LRU", "optimum"),
    "task": ("niah_single_*", "niah_multikey_*", "niah_*", "vt", "cwe", "fwe", "qa_*"),
}


def in_order(table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """`table` sorted by the columns `names`: numbers by size, known names as in ORDERS, others after them."""
    return table.sort_values(names, kind="stable", key=_ranks).reset_index(drop=True)


def with_budget(table: pd.DataFrame) -> pd.DataFrame:
    """`table` with the budget in the method's name if there are several of them."""
    if table["budget"].nunique() < 2:
        return table
    pairs = zip(table["method"], table["budget"], strict=True)
    return table.assign(method=[name if pd.isna(budget) else f"{name} ({budget:.0f})" for name, budget in pairs])


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """`items`, or of more than `most` so many at equal distances, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[place] for place in np.linspace(0, len(items) - 1, most).astype(int)]


def length_text(tokens: float) -> str:
    """A number of tokens: 128K for 131072, and in full if it is no multiple of 1024."""
    return f"{tokens / 1024:.0f}K" if tokens % 1024 == 0 else f"{tokens:.0f}"


def arranged(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """`frame` sorted by the columns `keys`, which come first."""
    others = [name for name in frame.columns if name not in keys]
    return in_order(frame[keys + others], keys)


def bare(name: str) -> str:
    """A name without what stands in brackets behind it."""
    return name.partition(" (")[0]


def _ranks(column: pd.Series) -> pd.Series:
    if column.name not in ORDERS:
        return column
    return column.map(lambda name: f"{_position(ORDERS[column.name], bare(name)):03d} {name}")


def _position(order: tuple[str, ...], name: str) -> int:
    return next((place for place, pattern in enumerate(order) if fnmatchcase(name, pattern)), len(order))


def percent(shares: pd.Series) -> list[str]:
    """Shares in per cent with one digit after the point; a dash for nothing."""
    return fixed(shares, 1, 0.01)


def fixed(values: pd.Series, digits: int, unit: float = 1) -> list[str]:
    """Numbers in multiples of `unit` with so many digits after the point; a dash for nothing."""
    return ["-" if pd.isna(value) else f"{value / unit:.{digits}f}" for value in values]
