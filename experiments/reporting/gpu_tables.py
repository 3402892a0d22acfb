"""The tables of the GPU experiments: whole steps, single kernels, prefill. Frames of records to frames of texts."""

from typing import Any

import pandas as pd

from experiments.harness.attended import is_equal_work, known_share

GB = 1e9
PLACES = ("gpu", "host")
# A floor that a step beats by more than the rates' own spread is none: its bytes moved at a higher rate.
_MOST_EFFICIENT = 1.02
# What method_time has no numbers for where a method did not fit into memory.
MEASURED = (
    "attended_tokens", "median_ms", "tokens_per_s", "hbm_floor_ms", "link_floor_ms", "efficiency", "compute_ms",
    "link_bytes",
)  # fmt: skip


def step_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of step_time without their raw samples and byte categories."""
    return rows.drop(columns=["step_ms", "gpu"]).sort_values(["context", "batch"], kind="stable").reset_index(drop=True)


def work_texts(table: pd.DataFrame) -> dict[str, list[str]]:
    """Two columns: the share of the true set, and whether that is equal work; a dash where a record says nothing."""
    rows = table.to_dict("records")
    shares = [known_share({**row, "capabilities": {"exact": row.get("exact") is True}}) for row in rows]
    bases = [row.get("attended_share_basis") for row in rows]
    return {
        "of true set %": [_share_text(share, basis) for share, basis in zip(shares, bases, strict=True)],
        "equal work": [_work_text(share, basis) for share, basis in zip(shares, bases, strict=True)],
    }


def _share_text(share: float | None, basis: Any) -> str:
    if share is not None:
        return f"{100 * share:.1f}"
    return "unknown" if isinstance(basis, str) else "-"


def _work_text(share: float | None, basis: Any) -> str:
    if share is None:
        return "unknown" if isinstance(basis, str) else "-"
    return "yes" if is_equal_work(share) else "NO"


def step_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a batch and variant."""
    return pd.DataFrame(
        {
            "batch": _texts(table["batch"], "{:.0f}"),
            "variant": table["variant"],
            "ms": _texts(table["median_ms"], "{:.2f}"),
            "tok/s": _texts(table["tokens_per_s"], "{:.0f}"),
            "link floor ms": _texts(table["link_floor_ms"], "{:.2f}"),
            "HBM floor ms": _texts(table["hbm_floor_ms"], "{:.2f}"),
            "exposed ms": _texts(table["exposed_ms"], "{:.2f}"),
            "overlap": _texts(table["overlap_efficiency"], "{:.3f}"),
            "hit %": _texts(100 * table["hit_rate"], "{:.1f}"),
            **work_texts(table),
            "method GB": _texts(table["allocated_bytes"] / GB, "{:.2f}"),
        }
    )


def method_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of method_time without raw samples, with totals for the bytes by category, and capabilities by name."""
    held = {f"{place}_bytes": [sum(sizes.values()) if sizes else None for sizes in rows[place]] for place in PLACES}
    promises = {name: [can[name] if can else None for can in rows["capabilities"]] for name in ("exact", "recalls")}
    kept = rows.drop(columns=["step_ms", "capabilities", *PLACES]).assign(**held, **promises)
    # Where no method fitted, a column has nothing from which its kind could be told.
    return kept.astype(dict.fromkeys((*MEASURED, *held), float))


def method_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a method and batch; no floor where a step was faster than it."""
    below = table["efficiency"] <= _MOST_EFFICIENT
    return pd.DataFrame(
        {
            "method": table["method"],
            "batch": _texts(table["batch"], "{:.0f}"),
            "attended": _texts(table["attended_tokens"], "{:.0f}"),
            **work_texts(table),
            "ms": _texts(table["median_ms"], "{:.2f}"),
            "tok/s": _texts(table["tokens_per_s"], "{:.0f}"),
            "HBM floor ms": _texts(table["hbm_floor_ms"], "{:.2f}"),
            "link floor ms": _texts(table["link_floor_ms"].where(below), "{:.2f}"),
            "efficiency": _texts(table["efficiency"].where(below), "{:.3f}"),
            "ms without transfers": _texts(table["compute_ms"], "{:.2f}"),
            "link MB a step": _texts(table["link_bytes"] / 1e6, "{:.1f}"),
            "GPU GB": _texts(table["gpu_bytes"] / GB, "{:.2f}"),
            "exact": _flags(table["exact"]),
            "recalls": _flags(table["recalls"]),
            "graph": _flags(table["graph"]),
            "selection": [text.partition("(")[0] if isinstance(text, str) else "-" for text in table["selection"]],
            "host_kv": [text if isinstance(text, str) else "-" for text in table["host_kv"]],
            "outcome": table["outcome"],
            "remark": remarks(table),
        }
    )


def remarks(table: pd.DataFrame) -> list[str]:
    """What each method has to say beside its speed; a dash for nothing."""
    said = table["remark"] if "remark" in table else [None] * len(table)
    return [text if isinstance(text, str) and text else "-" for text in said]


def attention_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a variant and batch."""
    return pd.DataFrame(
        {
            "variant": table["variant"],
            "batch": _texts(table["batch"], "{:.0f}"),
            "us": _texts(table["us"], "{:.1f}"),
            "GB/s": _texts(table["gb_s"], "{:.0f}"),
            "% of copy": _texts(100 * table["share_of_copy"], "{:.1f}"),
            "error": _texts(table["error"], "{:.1e}"),
        }
    )


def kernel_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a kernel, variant and batch; a copy has no time of its own."""
    table = table.reindex(columns=list(dict.fromkeys([*table.columns, "ms", "times_floor"])))
    return pd.DataFrame(
        {
            "kernel": table["kernel"],
            "variant": table["variant"],
            "batch": _texts(table["batch"], "{:.0f}"),
            "us": _texts(1e3 * table["ms"].astype(float), "{:.1f}"),
            "GB/s": _texts(table["gb_s"], "{:.0f}"),
            "times its floor": _texts(table["times_floor"], "{:.2f}"),
        }
    )


def prefill_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a prompt."""
    return pd.DataFrame(
        {
            "tokens": _texts(table["tokens"], "{:.0f}"),
            "seconds": _texts(table["seconds"], "{:.1f}"),
            "tokens/s": _texts(table["tokens_per_s"], "{:.0f}"),
            "weights GB": _texts(table["weight_bytes"] / GB, "{:.2f}"),
            "method GB": _texts(table["method_bytes"] / GB, "{:.2f}"),
            "peak GB": _texts(table["peak_bytes"] / GB, "{:.2f}"),
        }
    )


def _texts(values: pd.Series, form: str) -> list[str]:
    return ["-" if pd.isna(value) else form.format(value) for value in values]


def _flags(values: pd.Series) -> list[str]:
    return ["-" if pd.isna(value) else "yes" if value else "no" for value in values]
