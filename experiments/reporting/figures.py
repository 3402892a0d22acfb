"""One PNG per table. A block per section, so that no axis mixes CPU and GPU, and in it a row of axes per model."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from experiments.reporting.cells import ORDERS, length_text, with_budget
from experiments.reporting.collect import Section
from experiments.reporting.drawing import (
    MARKERS,
    SMALL_PRINT,
    bar_style,
    grouped_bars,
    legend,
    line_style,
    log_if_wide,
    method_styles,
    numbered,
    save,
    title,
)
from experiments.reporting.tables import GIB, by_category, headline, numbers, split

# Steps in a running mean: enough to see through the noise of one step.
WINDOW = 8
# What is less is rounding, and has no place on a log axis.
_LEAST_KL = 1e-6
_CATEGORIES = ("weights", "kv", "landmarks", "outliers", "other")


@dataclass(frozen=True)
class Drawing:
    """How one experiment is drawn: `draw` fills a row of `panels` axes; rows differ in the columns `apart`."""

    draw: Callable[[list[Axes], pd.DataFrame], None]
    panels: int
    apart: tuple[str, ...]


def write_figure(name: str, sections: list[Section], folder: Path) -> None:
    """Draw `<name>.png` and `<name>.svg` into `folder`; with nothing to draw, older ones are removed."""
    drawable = bool(sections) and name in DRAWINGS
    save(draw_figure(name, sections) if drawable else None, folder / name)


def draw_figure(name: str, sections: list[Section]) -> Figure:
    """The figure of one experiment."""
    drawing = DRAWINGS[name]
    blocks = [split(numbers(name, section), drawing.apart) for section in sections]
    width = 16.0 if drawing.panels > 1 else _width(blocks)
    figure = Figure(figsize=(width, 4.5 * sum(map(len, blocks))), layout="constrained")
    places = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=[len(block) for block in blocks])
    for place, block, section in zip(places[:, 0], blocks, sections, strict=True):
        caption = textwrap.fill(section.caption, int(width * 14))
        place.suptitle(caption, fontsize=SMALL_PRINT, x=0.01, horizontalalignment="left")
        rows = place.subplots(len(block), drawing.panels, squeeze=False)
        for axes, table in zip(rows, block, strict=True):
            drawing.draw(list(axes), table)
            axes[0].set_title(f"{headline(table)}\n{axes[0].get_title(loc='left')}".strip(), loc="left", fontsize=10)
    return figure


def _width(blocks: list[list[pd.DataFrame]]) -> float:
    bars = max(len(table) for block in blocks for table in block)
    return min(max(9.0, 2.0 + 0.6 * bars), 40.0)


def _throughput(axes: list[Axes], table: pd.DataFrame) -> None:
    low = table["tokens_per_s"] - table["batch"] / table["step_ms_p90"] * 1000
    high = table["batch"] / table["step_ms_p10"] * 1000 - table["tokens_per_s"]
    keys = zip(table["context"], table["batch"], strict=True)
    groups = [f"context {length_text(context)}\nbatch {batch:.0f}" for context, batch in keys]
    bars = table.assign(low=low, high=high, group=groups, series=table["method"], value=table["tokens_per_s"])
    grouped_bars(axes[0], bars)
    log_if_wide(axes[0], bars["value"])
    axes[0].set_ylabel("tokens per second (median; lines: p10-p90)")


def _ruler(axes: list[Axes], table: pd.DataFrame) -> None:
    low, high = table["score"] - table["ci95_low"], table["ci95_high"] - table["score"]
    bars = table.assign(low=low, high=high, group=table["task"], series=with_budget(table)["method"])
    grouped_bars(axes[0], bars.assign(value=table["score"]).dropna(subset=["value"]))
    axes[0].set_ylabel("score, % (lines: 95 % interval)")
    axes[0].set_ylim(0, 112)


def _fidelity(axes: list[Axes], table: pd.DataFrame) -> None:
    """Over the budget; a method without one is a line across."""
    table = table.assign(
        kl_mean=table["kl_mean"].clip(lower=_LEAST_KL),
        **{name: 100 * table[name] for name in ("top1_agreement", "attention_mass")},
    )
    _over_budget(axes[0], table, "kl_mean", f"KL mean, nats (from {_LEAST_KL:g} on)")
    _over_budget(axes[1], table, "top1_agreement", "Top-1 agreement, %")
    _over_budget(axes[2], table, "attention_mass", "Attention mass, %")
    axes[0].set_yscale("log")
    legend(axes[2], of=axes[0])  # The first has every method; beside the last there is room.


def _over_budget(axis: Axes, table: pd.DataFrame, value: str, name: str) -> None:
    for name, number in method_styles(table.assign(series=table["method"])).items():
        lines = table[(table["method"] == name) & table[value].notna()]
        if len(lines) and lines["budget"].isna().all():
            axis.axhline(lines[value].mean(), label=name, linestyle=":", color=line_style(number)["color"])
        elif len(lines):
            axis.plot(np.log2(lines["budget"]), lines[value], label=name, **line_style(number))
    budgets = sorted(table["budget"].dropna().unique())
    axis.set_xticks(np.log2(budgets), [f"{budget:.0f}" for budget in budgets])
    axis.set_xlabel("budget, tokens")
    title(axis, name)


def _residency(axes: list[Axes], table: pd.DataFrame) -> None:
    named = table.assign(series=with_budget(table)["method"])
    _totals(axes[0], named)
    _shares(axes[1], named)
    contexts = [f"context\n{length_text(context)}" for context in named["context"]]
    bars = named.assign(low=0, high=0, group=contexts, value=named["largest_batch"])
    grouped_bars(axes[2], bars, nothing="does not fit")
    log_if_wide(axes[2], bars["value"])
    title(axes[2], "Largest batch under the cap")
    axes[2].set_ylabel("sequences")


def _totals(axis: Axes, table: pd.DataFrame) -> None:
    for name, style in method_styles(table).items():
        chosen = table[table["series"] == name]
        axis.plot(np.log2(chosen["context"]), chosen["gpu_total"] / GIB, label=name, **line_style(style))
    cap = table["cap_bytes"].iloc[0] / GIB
    axis.axhline(cap, color="black", linestyle="--", linewidth=1, label=f"cap, {cap:g} GiB")
    contexts = sorted(table["context"].unique())
    axis.set_xticks(np.log2(contexts), [length_text(context) for context in contexts])
    log_if_wide(axis, table["gpu_total"] / GIB)
    title(axis, "GPU memory of the whole batch")
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("GiB")
    legend(axis)


def _shares(axis: Axes, table: pd.DataFrame) -> None:
    """Stacks of percent: stacks of GiB would be flat beside the whole KV, and a log axis has no stacks."""
    lines = table.to_dict("records")
    held = pd.DataFrame([by_category(line) for line in lines]).fillna(0.0)
    percent, base = held.div(table["gpu_total"], axis=0) * 100, pd.Series(0.0, table.index)
    # The same category has the same place in all bars and, after those of the methods, a style of its own.
    styles = numbered(held.columns, _CATEGORIES)
    for name in sorted(styles, key=styles.__getitem__):
        bars = axis.bar(
            table.index, percent[name], bottom=base, label=name, **bar_style(styles[name] + len(ORDERS["method"]))
        )
        _write_inside(axis, bars, [f"{size / GIB:.1f}" for size in held[name]])
        base = base + percent[name]
    labels = [f"{length_text(line['context'])} {line['series']}" for line in lines]
    axis.set_xticks(table.index, labels, rotation=90, fontsize=7)
    title(axis, "What it holds (numbers: GiB)")
    axis.set_ylabel("share, %")
    legend(axis)


def _write_inside(axis: Axes, bars: BarContainer, texts: list[str]) -> None:
    """Write into the bars that are high enough for a line of text."""
    fitting = [text if bar.get_height() > 6 else "" for bar, text in zip(bars, texts, strict=True)]
    for label in axis.bar_label(bars, fitting, label_type="center", fontsize=6):
        if label.get_text():
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})


def _prediction(axes: list[Axes], table: pd.DataFrame) -> None:
    table = table.astype(dict.fromkeys(("kv_accuracy", "token_accuracy", "reuse"), float))
    seeds = list(table["speculation"].unique())
    steps, layers = table[table["scope"] == "step"], table[table["scope"] == "layer"]
    first = steps[steps["speculation"] == seeds[0]]
    _curve(axes[0], first, "step", "kv_accuracy", "KV accuracy", line_style(0))
    _curve(axes[0], first, "step", "token_accuracy", "token accuracy", line_style(1))
    title(axes[0], f"Speculation '{seeds[0]}' (Fig. 7a)")
    _by_seed(axes[1], layers, "layer", seeds)
    title(axes[1], "KV accuracy by layer")
    _by_seed(axes[2], steps, "step", seeds)
    title(axes[2], "KV accuracy by seed (Fig. 7b)")
    for axis, lines, over in ((axes[0], steps, "step"), (axes[1], layers, "layer"), (axes[2], steps, "step")):
        _curve(axis, lines[lines["speculation"] == seeds[0]], over, "reuse", "last-step reuse", _REUSE)
        axis.set_xlabel("layer" if over == "layer" else f"decode step (dots; lines: mean over {WINDOW} steps)")
        axis.set_ylabel("%")
        legend(axis)
    # One scale, so that the three can be compared.
    lowest = min(100.0, *(axis.dataLim.y0 for axis in axes))
    for axis in axes:
        axis.set_ylim(10 * np.floor(lowest / 10) - 2, 102)


def _caches(axes: list[Axes], table: pd.DataFrame) -> None:
    seeds = list(table["speculation"].unique())
    table = table.sort_values("capacity").assign(prefetch=table["prefetch"].astype(bool))
    # What a cache misses without prediction depends on the real row only.
    alone = table[~table["prefetch"] & (table["speculation"] == seeds[0])]
    for cache, label, style in (("LRU", "no prediction", _REUSE), ("optimum", "optimum without prefetch", _OPTIMUM)):
        line = alone[alone["cache"] == cache]
        axes[0].plot(line["capacity"], 100 * line["misses"], label=label, **style)
    for number, seed in enumerate(seeds):
        ahead = table[table["prefetch"] & (table["cache"] == "LRU") & (table["speculation"] == seed)]
        axes[0].plot(ahead["capacity"], 100 * ahead["misses"], label=f"prefetching, {seed}", **line_style(number))
        axes[1].plot(ahead["capacity"], 100 * ahead["prefetched"], label=f"prefetched, {seed}", **line_style(number))
    title(axes[0], "Missing when needed")
    title(axes[1], "Fetched ahead")
    for axis in axes:
        axis.set_xlabel("capacity of the LRU cache, multiples of the budget")
        axis.set_ylabel("% of the selection")
        axis.set_ylim(bottom=0)
        legend(axis)


def _by_seed(axis: Axes, table: pd.DataFrame, over: str, seeds: list[str]) -> None:
    for number, seed in enumerate(seeds):
        _curve(axis, table[table["speculation"] == seed], over, "kv_accuracy", seed, line_style(number))


def _curve(axis: Axes, lines: pd.DataFrame, over: str, value: str, label: str, style: dict[str, Any]) -> None:
    """A line over layers as it is; over steps a running mean and, faint, the single steps."""
    lines = lines.dropna(subset=[value]).sort_values(over)
    if lines.empty:
        return
    places, percent = lines[over].astype(float), 100 * lines[value]
    if over == "step":
        axis.plot(places, percent, ".", color=style["color"], alpha=0.25, markersize=4)
        percent = percent.rolling(WINDOW, min_periods=1, center=True).mean()
    # Markers of different lines stand at different places: a line under another one can still be seen.
    every = max(1, len(lines) // 8)
    start = every * MARKERS.index(style.get("marker", "o")) // 3 % every
    axis.plot(places, percent, label=label, markevery=(start, every), **style)


_REUSE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
_OPTIMUM: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1}
DRAWINGS: dict[str, Drawing] = {
    "throughput": Drawing(_throughput, 1, ("model", "dtype")),
    "residency": Drawing(_residency, 3, ("model", "dtype", "cap_bytes", "batch")),
    "prediction": Drawing(_prediction, 3, ("model", "prompt", "context", "budget")),
    "prediction_cache": Drawing(_caches, 2, ("model", "prompt", "context", "budget")),
    "ruler": Drawing(_ruler, 1, ("model", "length", "point_budget")),
    "fidelity": Drawing(_fidelity, 3, ("model", "context")),
}
