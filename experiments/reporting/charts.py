"""A chart of tidy rows: grouped bars, lines or stacks of one column, a panel for each value of the others."""

import textwrap
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.cells import length_text, spread
from experiments.reporting.drawing import (
    MOST_GROUPS,
    MOST_PANELS,
    MOST_SERIES,
    PAGE,
    PALE,
    SMALL_PRINT,
    few_columns,
    grouped_bars,
    legend,
    log_if_wide,
    method_styles,
    name_ticks,
    numbered,
    say_how_many,
    title,
)
from experiments.reporting.escape import for_figure, frame_for_figure
from experiments.reporting.tables import split

_PANEL_HEIGHT = 3.6
_CAPTION = 1000
_TOKENS = ("context", "length")
# Columns whose name is no word for a reader.
_NAMES = {"point_budget": "budget"}
_MOST_STACKS = 2 * MOST_GROUPS


@dataclass(frozen=True)
class Chart:
    """`kind` of bars, lines or stack, the columns for the axes and the series, the words on the axes, the panels."""

    kind: str
    x: str
    y: str
    series: str
    x_words: str
    y_words: str
    panels: tuple[str, ...]


def draw_chart(name: str, chart: Chart, tables: list[tuple[str, pd.DataFrame]]) -> Figure:
    """A figure with a block for each (caption, rows): hardware is never mixed on one axis.

    Of very many panels only some are drawn, as the captions say.
    """
    chosen = spread(tables, MOST_PANELS)
    blocks = [_block(name, chart, caption, rows, MOST_PANELS // len(chosen)) for caption, rows in chosen]
    sizes = [len(block) for block, _ in blocks]
    figure = Figure(figsize=(PAGE, _PANEL_HEIGHT * sum(sizes) + 0.8), layout="constrained")
    places = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=sizes)
    for place, (block, caption) in zip(places[:, 0], blocks, strict=True):
        place.suptitle(textwrap.fill(caption, int(PAGE * 14)), fontsize=SMALL_PRINT, x=0.01, horizontalalignment="left")
        for axis, panel in zip(place.subplots(len(block), 1, squeeze=False)[:, 0], block, strict=True):
            _draw(axis, name, chart, panel)
    return figure


def _block(name: str, chart: Chart, caption: str, rows: pd.DataFrame, most: int) -> tuple[list[pd.DataFrame], str]:
    """The rows of each panel, and the caption of all."""
    panels = split(frame_for_figure(rows), chart.panels)
    shown = spread(panels, max(1, most))
    note = f"; drawn: {len(shown)} of {len(panels)}, all are in the table" if len(shown) < len(panels) else ""
    return shown, f"{name}. {for_figure(caption, _CAPTION)}{note}"


def _draw(axis: Axes, name: str, chart: Chart, panel: pd.DataFrame) -> None:
    {"bars": _bars, "lines": _lines, "stack": _stack}[chart.kind](axis, chart, panel)
    # A chart of one panel is named as a whole.
    title(axis, ", ".join(_words(column, panel[column].iloc[0]) for column in chart.panels) or name)
    axis.set_xlabel(chart.x_words)
    axis.set_ylabel(chart.y_words)
    axis.get_legend().set_title(chart.series.replace("_", " "), {"size": SMALL_PRINT})
    if "%" in chart.y_words:
        axis.set_ylim(0, 118 if chart.kind == "bars" else 108)


def _bars(axis: Axes, chart: Chart, panel: pd.DataFrame) -> None:
    # Room for about so many letters a group in the width of the page.
    letters = max(9, 110 // panel[chart.x].nunique())
    wrapped = {"break_long_words": False, "break_on_hyphens": False}
    groups = [textwrap.fill(_words(chart.x, value, short=True), letters, **wrapped) for value in panel[chart.x]]
    series = [_words(chart.series, value, short=True) for value in panel[chart.series]]
    bars = panel.assign(low=0.0, high=0.0, group=groups, series=series, value=panel[chart.y].astype(float))
    # Several rows of one bar (other budgets, other records): the best of each, as in the paper's tables.
    bars = bars.sort_values("value", kind="stable", ascending=False).drop_duplicates(["group", "series"]).sort_index()
    known = bars if chart.series == "method" else bars.drop(columns="method", errors="ignore")
    grouped_bars(axis, known, nothing="0")
    if "%" not in chart.y_words:
        log_if_wide(axis, bars["value"])


def _lines(axis: Axes, chart: Chart, panel: pd.DataFrame) -> None:
    named = panel.assign(series=panel[chart.series].astype(str))
    styles = method_styles(named if chart.series == "method" else named.drop(columns="method", errors="ignore"))
    for name in spread(list(styles), MOST_SERIES):
        chosen = named[named["series"] == name].sort_values(chart.x)
        every = max(1, len(chosen) // 8)
        axis.plot(chosen[chart.x], chosen[chart.y].astype(float), label=name, markevery=every, **styles[name].line)
    if chart.x in _TOKENS:
        values = sorted(panel[chart.x].unique())
        axis.set_xscale("log", base=2)
        name_ticks(axis, values, [length_text(value) for value in values])
        axis.minorticks_off()
    legend(axis)


def _stack(axis: Axes, chart: Chart, panel: pd.DataFrame) -> None:
    wide = panel.pivot_table(index=chart.x, columns=chart.series, values=chart.y, aggfunc="max", sort=False).fillna(0.0)
    shown = few_columns(wide.loc[spread(list(wide.index), _MOST_STACKS)])
    base, places = np.zeros(len(shown)), np.arange(len(shown))
    for name, look in numbered(shown.columns, ("weights", "kv", "landmarks", "outliers"), PALE).items():
        axis.bar(places, shown[name], 0.6, bottom=base, label=name, **look.bar)
        base = base + shown[name].to_numpy()
    axis.set_xticks(places, list(shown.index), rotation=90, fontsize=SMALL_PRINT)
    axis.margins(x=0.01)
    legend(axis)
    say_how_many(axis, "bars", len(shown), len(wide))


def _words(name: str, value: object, short: bool = False) -> str:
    if name in _TOKENS:
        text = length_text(float(str(value)))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if short or isinstance(value, str) else f"{_NAMES.get(name, name)} {text}"
