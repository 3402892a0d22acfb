"""What all figures share: styles that can be told apart by the colour-blind and in grey print, bars, axes, legends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.reporting.cells import ORDERS, bare, in_order, spread

# A colour for each known method, and two for others; Okabe and Ito's eight, which the colour-blind can tell apart, are
# among them. In grey, hatches and markers tell apart.
PALETTE = (
    *("#4D4D4D", "#E69F00", "#0072B2", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#A8A8A8", "#332288", "#882255"),
    *("#009E73", "#8C6D31", "#B3DE69", "#FF6F91"),
)
# For parts of a whole, which are no methods: the same colours, paler.
PALE = tuple("#" + "".join(f"{(int(color[n : n + 2], 16) + 255) // 2:02X}" for n in (1, 3, 5)) for color in PALETTE)
# Without dots, which make an SVG file five times as large.
HATCHES = ("", "///", "|||", "\\\\\\", "xxx", "---", "+++", "/", "|", "\\", "x", "-", "//", "||")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "d", "p", "8")
SMALL_PRINT = 8
SUFFIXES = (".png", ".svg")
# Inches: a page, and what axes alone on it have beside their legend. At 800 pixels for a page small print can be read.
PAGE = 10.0
_AXES = 7.4
_LETTER = 0.062
# Bounds, so that a figure of thousands of records can be drawn and read: panels a figure, the rest a panel.
MOST_PANELS = 12
MOST_GROUPS = 24
MOST_SERIES = len(PALETTE)
_MOST_TICKS = 12


@dataclass(frozen=True)
class Style:
    """How a series looks, as bars and as a line."""

    color: str
    hatch: str
    marker: str

    @property
    def bar(self) -> dict[str, Any]:
        """Keywords of bars."""
        return {"color": self.color, "hatch": self.hatch, "edgecolor": "black", "linewidth": 0.5}

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of a line."""
        return {"color": self.color, "marker": self.marker, "markersize": 5}


def style(number: int, variant: int = 0, palette: tuple[str, ...] = PALETTE) -> Style:
    """The style of that number; another variant has its colour, and not its hatch and marker."""
    pattern = number + variant
    color, hatch = palette[number % len(palette)], HATCHES[pattern % len(HATCHES)]
    return Style(color, hatch, MARKERS[pattern % len(MARKERS)])


def say_how_many(axis: Axes, what: str, shown: int, there: int) -> None:
    """Write into the axes that not all are drawn, if so."""
    if shown < there:
        where = {"transform": axis.transAxes, "horizontalalignment": "right", "verticalalignment": "top"}
        axis.text(0.99, 0.98, f"{shown} of {there} {what}; all are in the table", fontsize=SMALL_PRINT, **where)


def save(figure: Figure | None, stem: Path) -> None:
    """Write `<stem>.png` and `<stem>.svg`, the same bytes for the same figure; without one, older files go away."""
    if figure is None:
        for suffix in SUFFIXES:
            stem.with_suffix(suffix).unlink(missing_ok=True)
        return
    stem.parent.mkdir(parents=True, exist_ok=True)
    _settle(figure)
    # The writer's version, the date and random ids of elements would differ from run to run.
    figure.savefig(stem.with_suffix(".png"), dpi=110, metadata={"Software": None})
    with rc_context({"svg.hashsalt": stem.name}):
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def _settle(figure: Figure) -> None:
    """Lay the figure out once, on round places: the solver's last digits differ from run to run, and so would ids."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axis in figure.axes:
        axis.set_position([round(float(edge), 4) for edge in axis.get_position().bounds])


def grouped_bars(axis: Axes, table: pd.DataFrame, nothing: str = "") -> None:
    """Bars of `value` by `series` side by side in each `group`; `low` and `high` are the lengths of the error bars.

    `nothing` is written in place of a 0, for which a log axis has no place.
    """
    groups, styles = list(table["group"].unique()), method_styles(table)
    places, names = spread(groups, MOST_GROUPS), spread(list(styles), MOST_SERIES)
    # Few groups: empty room at both sides instead of bars as wide as the page.
    room = 0.5 + max(0, 3 - len(places)) / 2
    axis.set_xlim(-room, len(places) - 1 + room)
    width, inches = 0.8 / len(names), _AXES / (len(places) - 1 + 2 * room)
    for number, name in enumerate(names):
        chosen = table[(table["series"] == name) & table["group"].isin(places)]
        offsets = chosen["group"].map(places.index).astype(float) + (number - (len(names) - 1) / 2) * width
        errors = chosen[["low", "high"]].clip(lower=0).to_numpy(float).T
        shown = {"yerr": errors, "capsize": 2} if errors.any() else {}
        bars = axis.bar(offsets, chosen["value"], width, label=name, **shown, **styles[name].bar)
        _write_values(axis, bars, list(chosen["value"]), nothing, inches * width)
    _name_places(axis, places, inches)
    # Room for numbers that stand upright.
    axis.margins(y=0.25)
    legend(axis)
    say_how_many(axis, "groups", len(places), len(groups))


def _write_values(axis: Axes, bars: BarContainer, values: list[float], nothing: str, inches: float) -> None:
    """The numbers above bars of that width: upright where they would run into each other, left out of the narrowest."""
    if inches < 0.1:
        return
    texts = [_short(value) if value or not nothing else "" for value in values]
    upright = max(map(len, texts), default=0) * _LETTER > inches
    axis.bar_label(bars, texts, fontsize=7, padding=2, rotation=90 if upright else 0)
    foot = {"transform": axis.get_xaxis_transform(), "horizontalalignment": "center", "verticalalignment": "bottom"}
    for bar, value in zip(bars, values, strict=True):
        if nothing and not value:
            axis.text(bar.get_x() + bar.get_width() / 2, 0.02, nothing, rotation=90, fontsize=7, **foot)


def _name_places(axis: Axes, names: list[str], inches: float) -> None:
    longest = max(len(line) for name in names for line in str(name).split("\n"))
    slanted = {"rotation": 30, "horizontalalignment": "right"} if longest * _LETTER > 1.15 * inches else {}
    axis.set_xticks(range(len(names)), names, fontsize=SMALL_PRINT, **slanted)


def name_ticks(axis: Axes, places: Sequence[float], texts: Sequence[str]) -> None:
    """Ticks at some of the places, so few that their texts stand apart."""
    axis.set_xticks(spread(places, _MOST_TICKS), spread(texts, _MOST_TICKS))


def log_if_wide(axis: Axes, values: pd.Series) -> None:
    """A log axis where the smallest bar or point would be lost at the foot of a linear one."""
    positive = values[values > 0]
    if len(positive) and positive.max() >= 20 * positive.min():
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def method_styles(table: pd.DataFrame) -> dict[str, Style]:
    """The style of each series in reading order; a known method has the same colour in every figure.

    Several series of one method, its budgets, have its colour, and hatches and markers of their own.
    """
    if "method" not in table:
        return numbered(table["series"].unique())
    ordered = in_order(table, [name for name in ("method", "budget") if name in table])
    ordered = ordered.assign(method=ordered["method"].map(bare))
    numbers, variants, styles = _places(ordered["method"].unique(), ORDERS["method"]), dict[str, int](), {}
    for method, name in ordered[["method", "series"]].drop_duplicates().itertuples(index=False):
        variants[method] = variants.get(method, -1) + 1
        styles[name] = style(numbers[method], variants[method])
    return styles


def numbered(names: Iterable[str], known: tuple[str, ...] = (), palette: tuple[str, ...] = PALETTE) -> dict[str, Style]:
    """The style of each name by its place in `known`, which others follow as they come."""
    # Without an order, not from the grey on, which is for a bound.
    first = 0 if known else 1
    return {name: style(first + place, palette=palette) for name, place in _places(names, known).items()}


def _places(names: Iterable[str], known: tuple[str, ...]) -> dict[str, int]:
    places = {name: place for place, name in enumerate(dict.fromkeys([*known, *names]))}
    return {name: places[name] for name in names}


def title(axis: Axes, text: str) -> None:
    """A small title at the left."""
    axis.set_title(text, loc="left", fontsize=10)


def _short(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def legend(axis: Axes, of: Axes | None = None) -> None:
    """The series beside the axes: inside them it would hide bars. ``of``: other axes whose series are named."""
    look = {"fontsize": SMALL_PRINT, "handlelength": 2.2, "handleheight": 1.2}
    axis.legend(*(of or axis).get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1, 1), **look)


def legend_below(axis: Axes) -> None:
    """The series below axes that have others beside them."""
    axis.legend(fontsize=SMALL_PRINT, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, handlelength=2.2)


def few_columns(wide: pd.DataFrame) -> pd.DataFrame:
    """The largest columns of a stack, as many as there are colours; the rest added up as "other"."""
    total = wide.sum().sort_values(ascending=False, kind="stable")
    large = [name for name in total.index if name != "other"][: len(PALETTE) - 1]
    if len(wide.columns) <= len(PALETTE):
        return wide
    return wide[[name for name in wide.columns if name in large]].assign(other=wide.drop(columns=large).sum(axis=1))
