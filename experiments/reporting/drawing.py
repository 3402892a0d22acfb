"""What all figures share: styles that can be told apart by the colour-blind and in grey print, bars, axes, legends."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.reporting.cells import ORDERS, in_order

# Okabe and Ito: told apart with every common kind of colour blindness. In grey, hatches and markers tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
# Without dots, which make an SVG file five times as large.
HATCHES = ("", "///", "|||", "\\\\\\", "xxx", "---", "+++", "/", "|", "\\", "x", "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "d")
SMALL_PRINT = 8
SUFFIXES = (".png", ".svg")


def save(figure: Figure | None, stem: Path) -> None:
    """Write `<stem>.png` and `<stem>.svg`, the same bytes for the same figure; without one, older files go away."""
    if figure is None:
        for suffix in SUFFIXES:
            stem.with_suffix(suffix).unlink(missing_ok=True)
        return
    stem.parent.mkdir(parents=True, exist_ok=True)
    # The writer's version, the date and random ids of elements would differ from run to run.
    figure.savefig(stem.with_suffix(".png"), dpi=110, metadata={"Software": None})
    with rc_context({"svg.hashsalt": stem.name}):
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def grouped_bars(axis: Axes, table: pd.DataFrame, nothing: str = "") -> None:
    """Bars of `value` by `series` side by side in each `group`; `low` and `high` are the lengths of the error bars.

    `nothing` is written in place of a 0, for which a log axis has no place.
    """
    places, styles = list(table["group"].unique()), method_styles(table)
    width = 0.8 / len(styles)
    for number, (name, style) in enumerate(styles.items()):
        chosen = table[table["series"] == name]
        offsets = chosen["group"].map(places.index) + (number - (len(styles) - 1) / 2) * width
        errors = chosen[["low", "high"]].clip(lower=0).to_numpy().T
        shown = {"yerr": errors, "capsize": 2} if errors.any() else {}
        bars = axis.bar(offsets, chosen["value"], width, label=name, **shown, **bar_style(style))
        _write_values(axis, bars, list(chosen["value"]), nothing)
    # Few groups: empty room at both sides instead of bars as wide as the page.
    room = 0.5 + max(0, 3 - len(places)) / 2
    axis.set_xlim(-room, len(places) - 1 + room)
    axis.set_xticks(range(len(places)), places, fontsize=SMALL_PRINT)
    axis.margins(y=0.1)
    legend(axis)


def _write_values(axis: Axes, bars: BarContainer, values: list[float], nothing: str) -> None:
    axis.bar_label(bars, [_short(value) if value or not nothing else "" for value in values], fontsize=7, padding=2)
    foot = {"transform": axis.get_xaxis_transform(), "horizontalalignment": "center", "verticalalignment": "bottom"}
    for bar, value in zip(bars, values, strict=True):
        if nothing and not value:
            axis.text(bar.get_x() + bar.get_width() / 2, 0.02, nothing, rotation=90, fontsize=7, **foot)


def log_if_wide(axis: Axes, values: pd.Series) -> None:
    """A log axis where the smallest bar or point would be lost at the foot of a linear one."""
    positive = values[values > 0]
    if len(positive) and positive.max() >= 20 * positive.min():
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def method_styles(table: pd.DataFrame) -> dict[str, int]:
    """A number of a style per series in reading order; a known method has the same one in every figure."""
    keys = [name for name in ("method", "budget") if name in table]
    ordered = in_order(table, keys) if keys else table
    return numbered(ordered["series"].unique(), ORDERS["method"] if keys else ())


def numbered(names: Iterable[str], known: tuple[str, ...]) -> dict[str, int]:
    """The place of each name in `known`, which others follow as they come."""
    places = [*known, *(name for name in names if name not in known)]
    return {name: places.index(name) for name in names}


def bar_style(number: int) -> dict[str, Any]:
    """Colour and hatch of the series of that number."""
    hatch = HATCHES[number % len(HATCHES)]
    return {"color": PALETTE[number % len(PALETTE)], "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def line_style(number: int) -> dict[str, Any]:
    """Colour and marker of the series of that number."""
    return {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}


def title(axis: Axes, text: str) -> None:
    """A small title at the left."""
    axis.set_title(text, loc="left", fontsize=10)


def _short(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def legend(axis: Axes, of: Axes | None = None) -> None:
    """The series beside the axes: inside them they would hide bars. ``of``: other axes whose series are named."""
    named = (of or axis).get_legend_handles_labels()
    axis.legend(*named, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), handlelength=2.2, handleheight=1.2)
