"""Whole steps of every method on the tiny model, with made-up rates: a CPU has none that floors could be made of."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir

from dualdecoder.errors import CapacityError
from dualdecoder.method import REGISTRY, method_class, method_config
from dualdecoder.shapes import SHAPES
from experiments import method_time
from experiments.harness import gpu as harness_gpu
from experiments.harness import steps as harness_steps
from experiments.harness.attended import AttendedShare
from experiments.harness.gpu import LinkRate
from experiments.harness.rows import row_problem
from experiments.reporting.collect import Section
from experiments.reporting.tables import parts

CONF = Path(__file__).resolve().parents[2] / "conf"
SMALL = ("model=tiny", "context=512", "batch=2", "budget=64", "warmup=1", "steps=3")
RATE, LINK = 1e9, LinkRate(1e8, "made up")


def config(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("method_time", [*SMALL, *overrides])


@pytest.mark.parametrize("method", REGISTRY)
def test_every_method_gives_a_row(method: str) -> None:
    row = method_time.measure_on(config(f"method={method}"), "cpu", RATE, LINK)
    assert row_problem("method_time", [row]) is None
    assert len(row["step_ms"]) == 3
    assert row["link_bytes"] == row["urgent_bytes"] + row["prefetched_bytes"]
    assert row["efficiency"] == max(row["hbm_bytes"] / RATE, row["link_bytes"] / LINK.rate) * 1e3 / row["median_ms"]
    assert (row["compute_ms"] is None) == (not row["capabilities"]["offloads"])
    assert "replay" not in row["gpu"]


@pytest.mark.parametrize(("budget", "attended"), [(64, 112), (256, 336), (2048, 2464)])
def test_one_budget_means_equally_many_tokens_for_every_method(budget: int, attended: int) -> None:
    """By hand: selected, 24 outlier chunks of 8 for each 1,024 selected, 32 local; all multiples of a page of 16."""
    settings = [method_time.settings_of(config(f"method={name}", f"budget={budget}")) for name in REGISTRY]
    numbers = [s.attended_tokens for s in settings if hasattr(s, "attended_tokens")]
    assert numbers == [attended] * 7


@pytest.mark.parametrize(("name", "kind"), [("infinigen", "plain"), ("full_offload", "plain"), ("shadowkv", "gather")])
def test_a_floor_on_the_link_is_made_of_the_fastest_transfers(name: str, kind: str, monkeypatch) -> None:
    monkeypatch.setattr(harness_gpu, "measured_rates", lambda: harness_gpu.Rates(copy=4e12, link=55e9))
    monkeypatch.setattr(harness_gpu, "gather_rate", lambda record_bytes: 33e9)
    method = method_class(name)(SHAPES["tiny"], method_config(name, {}), batch=1, context=64, dtype=torch.float32)
    link = harness_gpu.link_rate(method)
    assert link.kind.startswith(kind) and link.rate == {"plain": 55e9, "gather": 33e9}[kind]


def test_bytes_of_the_dense_methods_by_hand() -> None:
    """4 layers, 2 KV heads, D 16, fp32: 1,024 bytes a token; 22 of 512 may be decoded, 6 are when timing ends."""
    full, offloaded = (
        method_time.measure_on(config(f"method={name}"), "cpu", RATE, LINK) for name in ("full_kv", "full_offload")
    )
    assert full["link_bytes"] == 0
    assert offloaded["link_bytes"] == 2 * 512 * 1024
    assert offloaded["host"]["kv"] == 512 * 1024
    assert (full["host_kv"], offloaded["host_kv"]) == ("none", "aliased(1)")
    weights = full["gpu"]["weights"] - 512 * 64 * 4
    assert full["hbm_bytes"] == offloaded["hbm_bytes"] == weights + 2 * (512 - 22 + 6) * 1024


def test_host_sequences_is_given_to_those_that_know_it() -> None:
    assert method_time.settings_of(config("method=full_offload")).host_sequences == 1
    assert method_time.settings_of(config("method=full_offload", "host_sequences=9")).host_sequences == 2
    assert method_time.settings_of(config("method=full_offload", "host_sequences=0")).host_sequences == 0
    assert (
        method_time.settings_of(config("method=full_offload", "+method.options.host_sequences=2")).host_sequences == 2
    )
    assert not hasattr(method_time.settings_of(config("method=full_kv")), "host_sequences")


def test_a_selection_is_replayed_for_a_method_that_selects_chunks() -> None:
    rows = [method_time.measure_on(config(f"method={name}"), "cpu", RATE, LINK) for name in ("full_kv", "dualdecoder")]
    assert [row["selection"] for row in rows] == ["its own", "synthetic(reuse=0.6, accuracy=0.88, seed=0)"]
    # 7 of a head's 8 chunks were predicted.
    assert rows[1]["hit_rate"] == 0.875


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), CapacityError("GPU memory: 1")])
def test_out_of_memory_is_an_outcome(error: Exception, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise error

    class Rates:
        copy = RATE

    monkeypatch.setattr(method_time, "require_gpu", lambda: None)
    monkeypatch.setattr(method_time, "measured_rates", Rates)
    monkeypatch.setattr(method_time, "model_of", fail)
    (row,) = method_time.measure(config("method=full_kv"))
    assert row_problem("method_time", [row]) is None
    assert (row["outcome"], row["problem"], row["median_ms"]) == ("out of memory", str(error), None)


def test_the_table_has_a_line_for_a_method_that_did_not_fit() -> None:
    row = method_time.measure_on(config("method=full_offload"), "cpu", RATE, LINK)
    short = {**dict.fromkeys(row), **method_time._keys(config("method=full_kv")), "outcome": "out of memory"}
    (part,) = parts("method_time", Section("", pd.DataFrame([row, short])))
    assert part.title == "method_time: tiny, float32, context 512"
    assert part.texts["method"].tolist() == ["full_kv", "full_offload"]
    assert part.texts["outcome"].tolist() == ["out of memory", "measured"]
    assert part.texts["ms"].tolist() == ["-", f"{row['median_ms']:.2f}"]
    assert part.texts["exact"].tolist() == ["-", "yes"]
    (alone,) = parts("method_time", Section("", pd.DataFrame([short])))
    assert alone.texts["link MB a step"].tolist() == ["-"]


def test_counters_grow_by_step() -> None:
    share = AttendedShare(1.0, "all")
    steps = harness_steps.Steps([3.0, 1.0, 2.0], {"urgent_bytes": 5, "hit": 3, "selected": 4}, False, share)
    assert (steps.median_ms, steps.link_bytes, steps.hit_rate) == (2.0, 5, 0.75)
    assert harness_steps.Steps([1.0], {"hit": 0, "selected": 0}, False, share).hit_rate is None
