"""A chart of tidy rows: grouped bars, lines or stacks of one column, a panel for each value of the others."""

import textwrap
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.cells import length_text
from experiments.reporting.drawing import (
    SMALL_PRINT,
    bar_style,
    grouped_bars,
    legend,
    line_style,
    log_if_wide,
    method_styles,
    numbered,
    title,
)
from experiments.reporting.tables import split

_PANEL_HEIGHT = 3.6
_TOKENS = ("context", "length")


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
    """A figure with a block for each (caption, rows): hardware is never mixed on one axis."""
    blocks = [split(rows, chart.panels) for _, rows in tables]
    panels = sum(map(len, blocks))
    width = max(_width(chart, panel) for block in blocks for panel in block)
    figure = Figure(figsize=(width, _PANEL_HEIGHT * panels + 0.8), layout="constrained")
    places = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=[len(block) for block in blocks])
    for place, block, (caption, _) in zip(places[:, 0], blocks, tables, strict=True):
        text = textwrap.fill(f"{name}. {caption}", int(width * 14))
        place.suptitle(text, fontsize=SMALL_PRINT, x=0.01, horizontalalignment="left")
        for axis, panel in zip(place.subplots(len(block), 1, squeeze=False)[:, 0], block, strict=True):
            _draw(axis, chart, panel)
    return figure


def _width(chart: Chart, panel: pd.DataFrame) -> float:
    """Inches: room for every bar, between that of a page and what can still be read on a screen."""
    bars = {"bars": len(panel), "stack": panel[chart.x].nunique(), "lines": 0}[chart.kind]
    return min(max(9.0, 2.0 + 0.5 * bars), 24.0)


def _draw(axis: Axes, chart: Chart, panel: pd.DataFrame) -> None:
    {"bars": _bars, "lines": _lines, "stack": _stack}[chart.kind](axis, chart, panel)
    title(axis, ", ".join(_words(name, panel[name].iloc[0]) for name in chart.panels))
    axis.set_xlabel(chart.x_words)
    axis.set_ylabel(chart.y_words)
    axis.get_legend().set_title(chart.series.replace("_", " "), {"size": SMALL_PRINT})
    if "%" in chart.y_words:
        axis.set_ylim(0, 108)


def _bars(axis: Axes, chart: Chart, panel: pd.DataFrame) -> None:
    groups = [textwrap.fill(_words(chart.x, value, short=True), 18) for value in panel[chart.x]]
    series = [_words(chart.series, value, short=True) for value in panel[chart.series]]
    bars = panel.assign(low=0.0, high=0.0, group=groups, series=series, value=panel[chart.y].astype(float))
    # Several rows of one bar (other budgets, other records): the best of each, as in the paper's tables.
    bars = bars.sort_values("value", kind="stable", ascending=False).drop_duplicates(["group", "series"]).sort_index()
    grouped_bars(axis, bars.drop(columns="method", errors="ignore") if chart.series != "method" else bars)
    if "%" not in chart.y_words:
        log_if_wide(axis, bars["value"])


def _lines(axis: Axes, chart: Chart, panel: pd.DataFrame) -> None:
    named = panel.assign(series=panel[chart.series].astype(str))
    for name, style in method_styles(named).items():
        chosen = named[named["series"] == name].sort_values(chart.x)
        every = max(1, len(chosen) // 8)
        axis.plot(chosen[chart.x], chosen[chart.y].astype(float), label=name, markevery=every, **line_style(style))
    if chart.x in _TOKENS:
        values = sorted(panel[chart.x].unique())
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [length_text(value) for value in values])
    legend(axis)


def _stack(axis: Axes, chart: Chart, panel: pd.DataFrame) -> None:
    wide = panel.pivot_table(index=chart.x, columns=chart.series, values=chart.y, aggfunc="max", sort=False).fillna(0.0)
    base, places = np.zeros(len(wide)), np.arange(len(wide))
    for name, style in numbered(wide.columns, ("weights", "kv", "landmarks", "outliers")).items():
        axis.bar(places, wide[name], 0.6, bottom=base, label=name, **bar_style(style))
        base = base + wide[name].to_numpy()
    axis.set_xticks(places, list(wide.index), rotation=90, fontsize=SMALL_PRINT)
    legend(axis)


def _words(name: str, value: object, short: bool = False) -> str:
    if name in _TOKENS:
        text = length_text(float(str(value)))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if short or isinstance(value, str) else f"{name} {text}"
