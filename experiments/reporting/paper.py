"""One output per table and figure of the paper, each with its tidy numbers and a chart.

An output names the experiments that it can be made from, and how raw rows become its rows. Those without records are
listed with the command that makes them, and never drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.harness.attended import is_equal_work, known_share
from experiments.reporting.cells import in_order, length_text
from experiments.reporting.charts import Chart, draw_chart
from experiments.reporting.collect import Collection
from experiments.reporting.drawing import save
from experiments.reporting.files import Part, as_markdown, table_paths, write_files

GIB = 2**30
# What is on the GPU whatever the method; the rest it needs only to keep its KV elsewhere. `kv` is the KV itself.
_NOT_AUXILIARY = ("weights", "activations", "kv", "buffers", "window")
_QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
_SPEEDS = ("method_time", "throughput")


@dataclass(frozen=True)
class Output:
    """`rows` makes tidy rows of raw ones of any of `experiments`; `command` makes the records."""

    name: str
    title: str
    experiments: tuple[str, ...]
    command: str
    rows: Callable[[pd.DataFrame], pd.DataFrame]
    chart: Chart


def write_outputs(collection: Collection, folder: Path) -> list[tuple[str, str]]:
    """Every output that the records allow, and a list of all; returns (title, state) of each."""
    states = [(output.title, _write(output, collection, folder)) for output in OUTPUTS]
    folder.mkdir(parents=True, exist_ok=True)
    table = as_markdown(pd.DataFrame(states, columns=["output", "files"]))
    (folder / "README.md").write_text(f"# The paper's tables and figures\n\n{table}\n", encoding="utf-8")
    return states


def output_tables(name: str, collection: Collection) -> list[tuple[str, pd.DataFrame]]:
    """Caption and tidy rows of an output, one pair for each experiment and kind of hardware; empty without records."""
    output = _output(name)
    sections = (section for name in output.experiments for section in collection.sections(name))
    return [(section.caption, rows) for section in sections if len(rows := _in_order(output.rows(section.rows)))]


def output_figure(name: str, collection: Collection) -> Figure | None:
    """The chart of an output; None without records."""
    output, tables = _output(name), output_tables(name, collection)
    return draw_chart(output.title, output.chart, tables) if tables else None


def _write(output: Output, collection: Collection, folder: Path) -> str:
    tidy, stem = output_tables(output.name, collection), folder / output.name
    save(output_figure(output.name, collection), stem)
    if not tidy:
        for path in table_paths(stem):
            path.unlink(missing_ok=True)
        return f"no records: run {output.command}"
    chunks = [(caption, [Part(output.title, as_texts(rows))]) for caption, rows in tidy]
    whole = pd.concat([rows.assign(caption=caption) for caption, rows in tidy])
    write_files(stem, output.title, whole, chunks)
    return f"{output.name}.*"


def as_texts(rows: pd.DataFrame) -> pd.DataFrame:
    """Numbers with four digits, a dash for nothing."""
    return pd.DataFrame({name: [_text(value) for value in rows[name]] for name in rows})


def _text(value: Any) -> str:
    if value is None or (not isinstance(value, str) and pd.isna(value)):
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def _output(name: str) -> Output:
    return next(output for output in OUTPUTS if output.name == name)


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    keys = [name for name in ("model", "context", "length", "batch", "method", "task") if name in rows]
    return in_order(rows, keys) if keys else rows.reset_index(drop=True)


def _largest_batch(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[["model", "context", "method", "largest_batch"]]


def _categories(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a category of GPU bytes."""
    keys = ("model", "context", "batch", "method")
    lines = [
        {**{key: line[key] for key in keys}, "case": f"{length_text(line['context'])} {line['method']}"}
        | {"category": name, "gib": size / GIB, "share_percent": 100 * size / line["gpu_total"]}
        for line in rows.to_dict("records")
        for name, size in line["gpu"].items()
        if size
    ]
    return pd.DataFrame(lines)


def _auxiliary(rows: pd.DataFrame) -> pd.DataFrame:
    """State that a method keeps on the GPU because its KV is elsewhere, as a share of all GPU bytes."""
    offloading = rows[[bool(sum(held.values())) for held in rows["host"]]]
    sizes = [sum(size for name, size in held.items() if name not in _NOT_AUXILIARY) for held in offloading["gpu"]]
    shares = 100 * np.array(sizes) / offloading["gpu_total"]
    return offloading[["model", "context", "batch", "method"]].assign(auxiliary_percent=shares)


def _accuracy_by_step(rows: pd.DataFrame) -> pd.DataFrame:
    """KV and token accuracy of the method's own speculation, a row each step and kind."""
    steps = rows[(rows["scope"] == "step") & (rows["speculation"] == "self")]
    keys = ["model", "prompt", "context", "budget", "step"]
    kinds = {"kv_accuracy": "KV", "token_accuracy": "token", "reuse": "last-step reuse"}
    long = steps.melt(id_vars=keys, value_vars=list(kinds), var_name="accuracy_of", value_name="percent")
    long = long.assign(accuracy_of=long["accuracy_of"].map(kinds), percent=100 * long["percent"].astype(float))
    return long.sort_values([*keys, "accuracy_of"], kind="stable").dropna(subset=["percent"])


def _accuracy_by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    whole = rows[rows["scope"] == "all"]
    shown = whole[["model", "prompt", "context", "budget", "speculation"]]
    return shown.assign(kv_percent=100 * whole["kv_accuracy"].astype(float))


def _speed(rows: pd.DataFrame) -> pd.DataFrame:
    measured = _with_work(rows.dropna(subset=["tokens_per_s"]))
    return measured[["model", "context", "batch", "method", "tokens_per_s"]]


def _with_work(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` with the method's name saying so where a speed is not, or not known to be, one of equal work.

    Of older records, which do not say what was attended to, the names stay as they are.
    """
    return rows.assign(method=[_name_with_work(row) for row in rows.to_dict("records")])


def _name_with_work(row: dict[str, Any]) -> str:
    share, said = known_share(row), isinstance(row.get("attended_share_basis"), str)
    if is_equal_work(share) or not said:
        return row["method"]
    return f"{row['method']} ({'share unknown' if share is None else f'{100 * share:.0f} % of its set'})"


def _latency(rows: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds of a step, which is the time between two tokens of one sequence."""
    measured = _with_work(rows.dropna(subset=["tokens_per_s"]))
    steps = list(measured["step_ms"])
    quantiles = {f"{name}_ms": [float(np.percentile(one, q)) for one in steps] for name, q in _QUANTILES.items()}
    return measured[["model", "context", "batch", "method"]].assign(**quantiles)


def _quality(rows: pd.DataFrame) -> pd.DataFrame:
    scored = rows.dropna(subset=["score"])
    return scored[["model", "task", "length", "point_budget", "method", "budget", "samples", "score"]]


def _schedules(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[["model", "context", "batch", "variant", "tokens_per_s"]].sort_values(["batch"], kind="stable")


def _kernels(rows: pd.DataFrame) -> pd.DataFrame:
    timed = rows.dropna(subset=["ms"]) if "ms" in rows else rows.iloc[:0]
    names = [f"{kernel}, {variant}" for kernel, variant in zip(timed["kernel"], timed["variant"], strict=True)]
    return timed[["batch"]].assign(kernel=names, us=1e3 * timed.get("ms", pd.Series(dtype=float)), gb_s=timed["gb_s"])


_RESIDENCY = "python -m experiments.residency -m model=llama-3.1-8b,qwen2.5-14b,qwen2.5-32b context=65536,131072,262144"
_PREDICTION = "python -m experiments.prediction -m prompt=continue,question"
_METHOD_TIME = "python -m experiments.method_time -m context=32768,124928 batch=1,8 method=full_kv,dualdecoder"
OUTPUTS = (
    Output(
        *("fig2", "Fig. 2: largest batch under the memory cap", ("residency",), _RESIDENCY, _largest_batch),
        Chart("bars", "context", "largest_batch", "method", "context, tokens", "sequences", ("model",)),
    ),
    Output(
        *("fig4", "Fig. 4: what GPU memory holds", ("residency",), _RESIDENCY, _categories),
        Chart("stack", "case", "share_percent", "category", "context and method", "share, %", ("model", "batch")),
    ),
    Output(
        *("fig5", "Fig. 5: auxiliary state of methods that offload", ("residency",), _RESIDENCY, _auxiliary),
        Chart("lines", "context", "auxiliary_percent", "method", "context, tokens", "share of GPU, %", ("model",)),
    ),
    Output(
        *("fig7a", "Fig. 7a: accuracy of KV and token prediction", ("prediction",), _PREDICTION, _accuracy_by_step),
        Chart("lines", "step", "percent", "accuracy_of", "decode step", "accuracy, %", ("model", "prompt", "budget")),
    ),
    Output(
        *("fig7b", "Fig. 7b: KV prediction by seed", ("prediction",), _PREDICTION, _accuracy_by_seed),
        Chart(
            "bars", "prompt", "kv_percent", "speculation", "prompt", "KV accuracy, %", ("model", "context", "budget")
        ),
    ),
    Output(
        *("table1", "Table 1: decode throughput", _SPEEDS, _METHOD_TIME, _speed),
        Chart("bars", "batch", "tokens_per_s", "method", "batch", "tokens per second", ("model", "context")),
    ),
    Output(
        *("table4", "Table 4: RULER", ("ruler",), "python -m experiments.ruler -m task=vt,cwe", _quality),
        Chart("bars", "task", "score", "method", "task", "score, %", ("model", "length", "point_budget")),
    ),
    Output(
        *("ablation_schedule", "Ablation: the schedule of transfers", ("step_time",)),
        *("python -m experiments.step_time -m batch=1,4,8,16,24", _schedules),
        Chart("bars", "batch", "tokens_per_s", "variant", "batch", "tokens per second", ("model", "context")),
    ),
    Output(
        *("ablation_speculation", "Ablation: speculation", ("prediction",), _PREDICTION, _accuracy_by_seed),
        Chart("bars", "budget", "kv_percent", "speculation", "budget, tokens", "KV accuracy, %", ("model", "prompt")),
    ),
    Output(
        *("micro", "Micro-benchmarks: kernels", ("kernel_time",), "python -m experiments.kernel_time", _kernels),
        Chart("bars", "kernel", "us", "batch", "kernel", "microseconds", ()),
    ),
    Output(
        *("latency", "Latency: time between two tokens", _SPEEDS, _METHOD_TIME, _latency),
        Chart("bars", "batch", "p50_ms", "method", "batch", "ms per step, median", ("model", "context")),
    ),
)
