"""One PNG per table. A block per section, so that no axis mixes CPU and GPU, and in it a row of panels per model."""

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

from experiments.reporting.cells import length_text, spread, with_budget
from experiments.reporting.collect import Section
from experiments.reporting.drawing import (
    MARKERS,
    MOST_GROUPS,
    MOST_PANELS,
    MOST_SERIES,
    PAGE,
    PALE,
    SMALL_PRINT,
    few_columns,
    grouped_bars,
    legend,
    legend_below,
    log_if_wide,
    method_styles,
    name_ticks,
    numbered,
    save,
    say_how_many,
    title,
)
from experiments.reporting.escape import for_figure, frame_for_figure
from experiments.reporting.tables import GIB, by_category, headline, numbers, split

# Steps in a running mean: enough to see through the noise of one step.
WINDOW = 8
# What is less is rounding, and has no place on a log axis.
_LEAST_KL = 1e-6
_PANEL_HEIGHT = 3.8
_CAPTION = 1000
_MOST_STACKS = 2 * MOST_GROUPS
_CATEGORIES = ("weights", "kv", "landmarks", "outliers", "other")


@dataclass(frozen=True)
class Panel:
    """Axes: what draws them, and a column without whose values they would be empty."""

    draw: Callable[[Axes, pd.DataFrame], None]
    needs: str


@dataclass(frozen=True)
class Drawing:
    """How one experiment is drawn: panels beside each other or not for rows that agree in the columns `apart`."""

    panels: tuple[Panel, ...]
    apart: tuple[str, ...]
    beside: bool = True
    # Beside the last panel, for all: the series of the first.
    one_legend: bool = False


def write_figure(name: str, sections: list[Section], folder: Path) -> None:
    """Draw `<name>.png` and `<name>.svg` into `folder`; with nothing to draw, older ones are removed."""
    drawable = bool(sections) and name in DRAWINGS
    save(draw_figure(name, sections) if drawable else None, folder / name)


def draw_figure(name: str, sections: list[Section]) -> Figure:
    """The figure of one experiment; of very many panels only some are drawn, as its captions say."""
    drawing, chosen = DRAWINGS[name], spread(sections, MOST_PANELS)
    blocks = [_block(name, drawing, section, MOST_PANELS // len(chosen)) for section in chosen]
    sizes = [sum(_height(drawing, table) for table in block) for block, _ in blocks]
    figure = Figure(figsize=(PAGE, sum(sizes)), layout="constrained")
    places = figure.subfigures(len(blocks), 1, squeeze=False, height_ratios=sizes)
    for place, (block, caption) in zip(places[:, 0], blocks, strict=True):
        place.suptitle(textwrap.fill(caption, int(PAGE * 14)), fontsize=SMALL_PRINT, x=0.01, horizontalalignment="left")
        heights = [_height(drawing, table) for table in block]
        rows = place.subfigures(len(block), 1, squeeze=False, height_ratios=heights)
        for row, table in zip(rows[:, 0], block, strict=True):
            _draw_row(row, drawing, table)
    return figure


def _block(name: str, drawing: Drawing, section: Section, most: int) -> tuple[list[pd.DataFrame], str]:
    """The tables of a section, each a row of panels, and the caption."""
    tables = split(frame_for_figure(numbers(name, section)), drawing.apart)
    shown = spread(tables, max(1, most))
    note = f"; drawn: {len(shown)} of {len(tables)}, all are in the table" if len(shown) < len(tables) else ""
    return shown, for_figure(section.caption, _CAPTION) + note


def _panels(drawing: Drawing, table: pd.DataFrame) -> list[Panel]:
    return [panel for panel in drawing.panels if table[panel.needs].notna().any()]


def _height(drawing: Drawing, table: pd.DataFrame) -> float:
    return _PANEL_HEIGHT * (1 if drawing.beside else max(1, len(_panels(drawing, table))))


def _draw_row(place: Any, drawing: Drawing, table: pd.DataFrame) -> None:
    panels = _panels(drawing, table)
    shape = (1, len(panels)) if drawing.beside else (len(panels), 1)
    axes = place.subplots(*shape, squeeze=False).ravel() if panels else []
    for axis, panel in zip(axes, panels, strict=True):
        panel.draw(axis, table)
    if panels and drawing.one_legend:
        legend(axes[-1], of=axes[0])
    if panels:
        axes[0].set_title(f"{headline(table)}\n{axes[0].get_title(loc='left')}".strip(), loc="left", fontsize=10)


def _throughput(axis: Axes, table: pd.DataFrame) -> None:
    low = table["tokens_per_s"] - table["batch"] / table["step_ms_p90"] * 1000
    high = table["batch"] / table["step_ms_p10"] * 1000 - table["tokens_per_s"]
    keys = zip(table["context"], table["batch"], strict=True)
    groups = [f"context {length_text(context)}\nbatch {batch:.0f}" for context, batch in keys]
    bars = table.assign(low=low, high=high, group=groups, series=table["method"], value=table["tokens_per_s"])
    grouped_bars(axis, bars)
    log_if_wide(axis, bars["value"])
    title(axis, "Decode speed")
    axis.set_xlabel("context, tokens, and batch, sequences")
    axis.set_ylabel("tokens per second (median; lines: p10-p90)")


def _ruler(axis: Axes, table: pd.DataFrame) -> None:
    low, high = table["score"] - table["ci95_low"], table["ci95_high"] - table["score"]
    bars = table.assign(low=low.fillna(0), high=high.fillna(0), group=table["task"])
    grouped_bars(axis, bars.assign(series=with_budget(table)["method"], value=table["score"]).dropna(subset=["value"]))
    title(axis, "RULER")
    axis.set_xlabel("task")
    axis.set_ylabel("score, % (lines: 95 % interval)")
    axis.set_ylim(0, 118)


def _divergence(axis: Axes, table: pd.DataFrame) -> None:
    kl = table["kl_mean"].clip(lower=_LEAST_KL)
    _over_budget(axis, table.assign(value=kl), "Divergence", f"KL mean, nats (from {_LEAST_KL:g} on)")
    axis.set_yscale("log")


def _agreement(axis: Axes, table: pd.DataFrame) -> None:
    _over_budget(axis, table.assign(value=100 * table["top1_agreement"]), "Agreement", "top-1 agreement, %")


def _mass(axis: Axes, table: pd.DataFrame) -> None:
    _over_budget(axis, table.assign(value=100 * table["attention_mass"]), "Attention mass", "attention mass, %")


def _over_budget(axis: Axes, table: pd.DataFrame, words: str, y_words: str) -> None:
    """Lines of `value` over the budget; a method without one is a line across."""
    styles = method_styles(table.assign(series=table["method"]))
    for method in spread(list(styles), MOST_SERIES):
        lines = table[(table["method"] == method) & table["value"].notna()]
        if len(lines) and lines["budget"].isna().all():
            axis.axhline(lines["value"].mean(), label=method, linestyle=":", color=styles[method].color)
        elif len(lines):
            axis.plot(np.log2(lines["budget"]), lines["value"], label=method, **styles[method].line)
    budgets = sorted(table["budget"].dropna().unique())
    name_ticks(axis, np.log2(budgets), [f"{budget:.0f}" for budget in budgets])
    title(axis, words)
    axis.set_xlabel("budget, tokens")
    axis.set_ylabel(y_words)


def _totals(axis: Axes, table: pd.DataFrame) -> None:
    named = table.assign(series=with_budget(table)["method"])
    styles = method_styles(named)
    for name in spread(list(styles), MOST_SERIES):
        chosen = named[named["series"] == name]
        axis.plot(np.log2(chosen["context"]), chosen["gpu_total"] / GIB, label=name, **styles[name].line)
    cap = table["cap_bytes"].iloc[0] / GIB
    axis.axhline(cap, color="black", linestyle="--", linewidth=1, label=f"cap, {cap:g} GiB")
    contexts = sorted(table["context"].unique())
    name_ticks(axis, np.log2(contexts), [length_text(context) for context in contexts])
    log_if_wide(axis, table["gpu_total"] / GIB)
    title(axis, "GPU memory of the whole batch")
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("GiB")
    legend(axis)


def _shares(axis: Axes, table: pd.DataFrame) -> None:
    """Stacks of percent: stacks of GiB would be flat beside the whole KV, and a log axis has no stacks."""
    named = table.assign(series=with_budget(table)["method"]).to_dict("records")
    lines = spread(named, _MOST_STACKS)
    held = few_columns(pd.DataFrame([by_category(line) for line in lines]).fillna(0.0))
    percent, base = held.div([line["gpu_total"] for line in lines], axis=0) * 100, pd.Series(0.0, held.index)
    # The same category has the same place in all bars, and one of the paler styles, which are no method's.
    for name, look in _categories(held).items():
        bars = axis.bar(held.index, percent[name], bottom=base, label=for_figure(name), **look.bar)
        _write_inside(axis, bars, [f"{size / GIB:.1f}" for size in held[name]])
        base = base + percent[name]
    labels = [f"{length_text(line['context'])} {line['series']}" for line in lines]
    axis.set_xticks(held.index, labels, rotation=90, fontsize=7)
    axis.margins(x=0.01)
    title(axis, "What it holds (numbers: GiB)")
    axis.set_xlabel("context, tokens, and method")
    axis.set_ylabel("share, %")
    legend(axis)
    say_how_many(axis, "bars", len(lines), len(named))


def _categories(held: pd.DataFrame) -> dict[str, Any]:
    styles = numbered(held.columns, _CATEGORIES, PALE)
    known = [name for name in _CATEGORIES if name in styles]
    return {name: styles[name] for name in [*known, *(name for name in styles if name not in known)]}


def _write_inside(axis: Axes, bars: BarContainer, texts: list[str]) -> None:
    """Write upright into the bars that are high enough for it."""
    fitting = [text if bar.get_height() > 12 else "" for bar, text in zip(bars, texts, strict=True)]
    for label in axis.bar_label(bars, fitting, label_type="center", fontsize=6, rotation=90):
        if label.get_text():
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3})


def _largest(axis: Axes, table: pd.DataFrame) -> None:
    contexts = [length_text(context) for context in table["context"]]
    bars = table.assign(series=with_budget(table)["method"], group=contexts, value=table["largest_batch"])
    grouped_bars(axis, bars.assign(low=0, high=0), nothing="does not fit")
    log_if_wide(axis, bars["value"])
    title(axis, "Largest batch under the cap")
    axis.set_xlabel("context, tokens")
    axis.set_ylabel("sequences")


def _against(axis: Axes, table: pd.DataFrame) -> None:
    seed, steps = _seeds(table)[0], table[table["scope"] == "step"]
    first = steps[steps["speculation"] == seed]
    looks = numbered(("KV accuracy", "token accuracy"))
    _curve(axis, first, "step", "kv_accuracy", "KV accuracy", looks["KV accuracy"].line)
    _curve(axis, first, "step", "token_accuracy", "token accuracy", looks["token accuracy"].line)
    _finish_prediction(axis, table, "step", f"Speculation '{seed}' (Fig. 7a)")


def _by_layer(axis: Axes, table: pd.DataFrame) -> None:
    _by_seed(axis, table, "layer")
    _finish_prediction(axis, table, "layer", "KV accuracy by layer")


def _by_step(axis: Axes, table: pd.DataFrame) -> None:
    _by_seed(axis, table, "step")
    _finish_prediction(axis, table, "step", "KV accuracy by seed (Fig. 7b)")


def _by_seed(axis: Axes, table: pd.DataFrame, over: str) -> None:
    lines = table[table["scope"] == over]
    for seed, look in numbered(_seeds(table)).items():
        _curve(axis, lines[lines["speculation"] == seed], over, "kv_accuracy", seed, look.line)


def _finish_prediction(axis: Axes, table: pd.DataFrame, over: str, words: str) -> None:
    lines = table[(table["scope"] == over) & (table["speculation"] == _seeds(table)[0])]
    _curve(axis, lines, over, "reuse", "last-step reuse", _REUSE)
    title(axis, words)
    words_below = "layer" if over == "layer" else f"decode step (dots; lines: mean over {WINDOW} steps)"
    axis.set_xlabel(words_below, fontsize=SMALL_PRINT)
    axis.set_ylabel("%")
    # One scale, so that the three can be compared.
    shares = table[["kv_accuracy", "token_accuracy", "reuse"]].astype(float).min()
    axis.set_ylim(10 * np.floor(10 * min(1.0, shares.min())) - 2, 102)
    legend_below(axis)


def _seeds(table: pd.DataFrame) -> list[str]:
    return spread(list(table["speculation"].unique()), MOST_SERIES)


def _missing(axis: Axes, table: pd.DataFrame) -> None:
    table, seeds = table.sort_values("capacity"), _seeds(table)
    # What a cache misses without prediction depends on the real row only.
    alone = table[~table["prefetch"].astype(bool) & (table["speculation"] == seeds[0])]
    for cache, label, look in (("LRU", "no prediction", _REUSE), ("optimum", "optimum without prefetch", _OPTIMUM)):
        line = alone[alone["cache"] == cache]
        axis.plot(line["capacity"], 100 * line["misses"], label=label, **look)
    _with_prefetch(axis, table, "misses", "prefetching")
    title(axis, "Missing when needed")


def _fetched(axis: Axes, table: pd.DataFrame) -> None:
    _with_prefetch(axis, table.sort_values("capacity"), "prefetched", "prefetched")
    title(axis, "Fetched ahead")


def _with_prefetch(axis: Axes, table: pd.DataFrame, value: str, words: str) -> None:
    for seed, look in numbered(_seeds(table)).items():
        chosen = (table["cache"] == "LRU") & (table["speculation"] == seed)
        ahead = table[table["prefetch"].astype(bool) & chosen]
        axis.plot(ahead["capacity"], 100 * ahead[value], label=f"{words}, {seed}", **look.line)
    axis.set_xlabel("capacity of the LRU cache, multiples of the budget")
    axis.set_ylabel("% of the selection")
    axis.set_ylim(bottom=0)
    legend_below(axis)


def _curve(axis: Axes, lines: pd.DataFrame, over: str, value: str, label: str, look: dict[str, Any]) -> None:
    """A line over layers as it is; over steps a running mean and, faint, the single steps."""
    lines = lines.dropna(subset=[value, over]).sort_values(over)
    if lines.empty:
        return
    places, percent = lines[over].astype(float), 100 * lines[value].astype(float)
    if over == "step":
        axis.plot(places, percent, ".", color=look["color"], alpha=0.25, markersize=4)
        percent = percent.rolling(WINDOW, min_periods=1, center=True).mean()
    # Markers of different lines stand at different places: a line under another one can still be seen.
    every = max(1, len(lines) // 8)
    start = every * MARKERS.index(look.get("marker", "o")) // 3 % every
    axis.plot(places, percent, label=label, markevery=(start, every), **look)


_REUSE: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
_OPTIMUM: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1}
DRAWINGS: dict[str, Drawing] = {
    "throughput": Drawing((Panel(_throughput, "tokens_per_s"),), ("model", "dtype")),
    "residency": Drawing(
        (Panel(_totals, "gpu_total"), Panel(_shares, "gpu_total"), Panel(_largest, "largest_batch")),
        ("model", "dtype", "cap_bytes", "batch"),
        beside=False,
    ),
    "prediction": Drawing(
        (Panel(_against, "step"), Panel(_by_layer, "layer"), Panel(_by_step, "step")),
        ("model", "prompt", "context", "budget"),
    ),
    "prediction_cache": Drawing(
        (Panel(_missing, "misses"), Panel(_fetched, "prefetched")), ("model", "prompt", "context", "budget")
    ),
    "ruler": Drawing((Panel(_ruler, "score"),), ("model", "length", "point_budget")),
    "fidelity": Drawing(
        (Panel(_divergence, "kl_mean"), Panel(_agreement, "top1_agreement"), Panel(_mass, "attention_mass")),
        ("model", "context"),
        one_legend=True,
    ),
}
