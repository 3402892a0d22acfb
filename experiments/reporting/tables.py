"""The tables: plain numbers for the CSV file, and the same numbers as texts, apart by model, for reading."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.reporting.cells import arranged, fixed, length_text, percent, spread, with_budget
from experiments.reporting.collect import Section
from experiments.reporting.files import Part, write_files
from experiments.reporting.gpu_tables import (
    attention_texts,
    kernel_texts,
    method_numbers,
    method_texts,
    prefill_texts,
    remarks,
    step_numbers,
    step_texts,
    work_texts,
)
from experiments.reporting.quality_tables import (
    RULER_UNIT,
    fidelity_numbers,
    fidelity_texts,
    harness_numbers,
    harness_texts,
    ruler_numbers,
    ruler_texts,
)

# Tables of one section that are printed; a reader of more takes the CSV or Parquet file.
MOST_PARTS = 40
GIB = 2**30
MIB = 2**20
# Below this share of the total a category is not worth a name.
_SMALL = 0.01


@dataclass(frozen=True)
class Table:
    """How one experiment is tabulated: `numbers` makes the CSV columns, `texts` what is read of one model.

    Rows that differ in a column of `apart` are printed in different tables; `unit` says what a bare cell holds.
    """

    numbers: Callable[[pd.DataFrame], pd.DataFrame]
    texts: Callable[[pd.DataFrame], pd.DataFrame]
    apart: tuple[str, ...]
    unit: str = ""


def no_records(name: str) -> str:
    """What stands in place of a table without records."""
    return f"no records: run python -m experiments.{name}"


def write_tables(name: str, sections: list[Section], folder: Path) -> list[Path]:
    """Write `<name>` as CSV, Parquet, Markdown and LaTeX into `folder`; each says so if there are no records."""
    frames = [numbers(name, section).assign(caption=section.caption) for section in sections]
    whole = pd.concat(frames) if frames else pd.DataFrame({"note": [no_records(name)]})
    chunks = [(section.caption, parts(name, section)) for section in sections]
    return write_files(folder / name, name, whole, chunks, no_records(name))


def numbers(name: str, section: Section) -> pd.DataFrame:
    """The rows of one section as plain numbers, one column each, in reading order."""
    return TABLES[name].numbers(section.rows)


def parts(name: str, section: Section) -> list[Part]:
    """The tables of one section as texts; of very many only some, as the last says."""
    table, made = TABLES[name], []
    groups = split(numbers(name, section), table.apart)
    for group in spread(groups, MOST_PARTS):
        texts = table.texts(group)
        words = headline(group, without=texts.columns)
        made.append(Part((f"{name}: {words}" if words else name) + table.unit, texts))
    if len(made) < len(groups):
        note = f"{len(made)} of {len(groups)} tables, at equal distances; the others are in {name}.csv"
        made.append(Part(f"{name}: not all", pd.DataFrame({"output": [note]})))
    return made


def split(table: pd.DataFrame, names: tuple[str, ...]) -> list[pd.DataFrame]:
    """The rows of `table` apart by those of the columns `names` that it has, in the order in which they come."""
    present = [name for name in names if name in table]
    if not present:
        return [table]
    return [group.reset_index(drop=True) for _, group in table.groupby(present, sort=False, dropna=False)]


def headline(table: pd.DataFrame, without: Any = ()) -> str:
    """What all rows of `table` have in common, in words."""
    names = [name for name in _HEADLINE if name in table and name not in without and table[name].nunique() == 1]
    return ", ".join(_HEADLINE[name](table[name].dropna().iloc[0]) for name in names)


def by_category(line: dict[str, Any]) -> dict[str, float]:
    """GPU bytes of a row of the residency table by category, largest first; the small ones together are "other"."""
    sizes = {name[4:-6]: size for name, size in line.items() if name.startswith("gpu_") and name.endswith("_bytes")}
    sizes = {name: size for name, size in sizes.items() if isinstance(size, int | float)}
    large = {name: size for name, size in sizes.items() if size and size >= _SMALL * line["gpu_total"]}
    kept = dict(sorted(large.items(), key=lambda item: -item[1]))
    rest = sum(sizes.values()) - sum(kept.values())
    return {**kept, "other": rest} if rest else kept


def _throughput(rows: pd.DataFrame) -> pd.DataFrame:
    quantiles = {f"step_ms_p{q}": [float(np.percentile(steps, q)) for steps in rows["step_ms"]] for q in (10, 50, 90)}
    return arranged(rows.drop(columns="step_ms").assign(**quantiles), ["model", "dtype", "context", "batch", "method"])


def _throughput_texts(table: pd.DataFrame) -> pd.DataFrame:
    middle, low, high = (fixed(table[f"step_ms_p{q}"], 1) for q in (50, 10, 90))
    return pd.DataFrame(
        {
            "context": [length_text(value) for value in table["context"]],
            "batch": fixed(table["batch"], 0),
            "method": table["method"],
            "tok/s": fixed(table["tokens_per_s"], 1),
            "step ms, median (p10-p90)": [f"{m} ({a}-{b})" for m, a, b in zip(middle, low, high, strict=True)],
            **work_texts(table),
            "hit rate %": percent(table["hit_rate"]),
            "urgent MiB/step": fixed(table["urgent_bytes_per_step"], 2, MIB),
            "prefetched MiB/step": fixed(table["prefetched_bytes_per_step"], 2, MIB),
            "KV on GPU GiB": fixed(table["kv_gpu_bytes"], 2, GIB),
            "remark": remarks(table),
        }
    )


def _residency(rows: pd.DataFrame) -> pd.DataFrame:
    categories = {
        f"{place}_{category}_bytes": [held.get(category, 0) for held in rows[place]]
        for place in ("gpu", "host")
        for category in sorted({key for held in rows[place] for key in held})
    }
    keys = ["model", "dtype", "cap_bytes", "context", "batch", "method", "budget"]
    return arranged(rows.drop(columns=["gpu", "host"]).assign(**categories), keys)


def _residency_texts(table: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "context": [length_text(value) for value in table["context"]],
            "method": with_budget(table)["method"],
            "batch": fixed(table["batch"], 0),
            "GPU GiB": fixed(table["gpu_total"], 2, GIB),
            "GPU GiB by category": [_category_text(line) for line in table.to_dict("records")],
            "GiB per sequence": fixed(table["per_sequence_gpu"], 2, GIB),
            "host GiB per sequence": fixed(table["host_total"] / table["batch"], 2, GIB),
            "largest batch": [f"{batch:.0f}" if batch else "does not fit" for batch in table["largest_batch"]],
        }
    )


def _category_text(line: dict[str, Any]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in by_category(line).items())


def _prediction(rows: pd.DataFrame) -> pd.DataFrame:
    return arranged(rows, ["model", "prompt", "context", "budget", "speculation", "scope", "layer", "step"])


def _prediction_texts(table: pd.DataFrame) -> pd.DataFrame:
    table = table[table["scope"] == "all"].reset_index(drop=True)
    return pd.DataFrame(
        {
            "prompt": table["prompt"],
            "context": [length_text(value) for value in table["context"]],
            "budget": fixed(table["budget"], 0),
            "steps": fixed(table["steps"], 0),
            "speculation": table["speculation"],
            "KV accuracy %": percent(table["kv_accuracy"]),
            "last-step reuse %": percent(table["reuse"]),
            "token accuracy %": percent(table["token_accuracy"]),
        }
    )


def _caches(rows: pd.DataFrame) -> pd.DataFrame:
    return arranged(rows, ["model", "prompt", "context", "budget", "speculation", "cache", "capacity", "prefetch"])


def _cache_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line per cache, what it misses without prefetching beside what it misses with it."""
    keys = ["prompt", "context", "budget", "speculation", "cache", "capacity"]
    without, ahead = (table[table["prefetch"] == flag].set_index(keys) for flag in (False, True))
    both = without[["misses"]].join(ahead[["prefetched"]].assign(ahead=ahead["misses"])).reset_index()
    return pd.DataFrame(
        {
            "prompt": both["prompt"],
            "context": [length_text(value) for value in both["context"]],
            "budget": fixed(both["budget"], 0),
            "speculation": both["speculation"],
            "cache": both["cache"],
            "capacity": [f"{value:g}x" for value in both["capacity"]],
            "misses %": percent(both["misses"]),
            "misses with prefetch %": percent(both["ahead"]),
            "prefetched %": percent(both["prefetched"]),
        }
    )


def _method_time(rows: pd.DataFrame) -> pd.DataFrame:
    return arranged(method_numbers(rows), ["model", "dtype", "context", "batch", "method"])


TABLES: dict[str, Table] = {
    "throughput": Table(_throughput, _throughput_texts, ("model", "dtype")),
    "residency": Table(_residency, _residency_texts, ("model", "dtype", "cap_bytes")),
    "prediction": Table(_prediction, _prediction_texts, ("model",)),
    "prediction_cache": Table(_caches, _cache_texts, ("model",), unit=", % of the selection"),
    "ruler": Table(ruler_numbers, ruler_texts, ("model", "length", "point_budget", "prompts"), unit=RULER_UNIT),
    "fidelity": Table(fidelity_numbers, fidelity_texts, ("model", "context")),
    "lm_eval": Table(harness_numbers, harness_texts, ("model",)),
    "step_time": Table(step_numbers, step_texts, ("model", "context", "selection", "host_kv")),
    "method_time": Table(_method_time, method_texts, ("model", "dtype", "context")),
    "attention_time": Table(lambda rows: rows, attention_texts, ("model", "dtype", "context")),
    "kernel_time": Table(lambda rows: rows, kernel_texts, ()),
    "prefill_time": Table(lambda rows: rows, prefill_texts, ("model",)),
}
# The paper's tables: named in every report, also where there are no records for them.
MAIN_TABLES = ("throughput", "residency", "prediction", "ruler")
_HEADLINE: dict[str, Callable[[Any], str]] = {
    "model": str,
    "dtype": str,
    "prompt": str,
    "context": lambda tokens: f"context {length_text(tokens)}",
    "length": lambda tokens: f"length {length_text(tokens)}",
    "batch": lambda batch: f"batch {batch:.0f}",
    "budget": lambda budget: f"budget {budget:.0f}",
    "selection": str,
    "host_kv": lambda text: f"host KV {text}",
    "prompts": str,
    "cap_bytes": lambda size: f"cap {size / GIB:g} GiB",
}
