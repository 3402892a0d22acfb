"""The tables of the GPU experiments: whole steps, single kernels, prefill. Frames of records to frames of texts."""

import pandas as pd

GB = 1e9


def step_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of step_time without their raw samples and byte categories."""
    return rows.drop(columns=["step_ms", "gpu"]).sort_values(["context", "batch"], kind="stable").reset_index(drop=True)


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
            "method GB": _texts(table["allocated_bytes"] / GB, "{:.2f}"),
        }
    )


def kernel_texts(table: pd.DataFrame) -> pd.DataFrame:
    """One line a kernel, variant and batch."""
    return pd.DataFrame(
        {
            "kernel": table["kernel"],
            "variant": table["variant"],
            "batch": _texts(table["batch"], "{:.0f}"),
            "us": _texts(1e3 * table["ms"], "{:.1f}"),
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
