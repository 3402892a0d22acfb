"""Records and rows to test with; none comes from a measurement."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.harness.records import Record, write_record

GIB = 2**30
CPU_ENVIRONMENT = {
    "platform": "Linux 6 x86_64",
    "python": "3.11.0",
    **dict.fromkeys(("torch", "triton", "transformers", "numpy", "lock"), "1"),
    "cpu": "Test CPU",
    "physical_cores": 2,
    "logical_cores": 2,
    "torch_threads": 2,
    "host_ram_bytes": 8 * GIB,
    "gpu": None,
    "launcher": "none",
    "commit": "c" * 40,
    "dirty": False,
    "code": "1" * 64,
}
GPU = {
    "name": "NVIDIA H200",
    "memory_mib": "143771",
    "driver": "580.1",
    "cuda": "13.0",
    "pcie_generation": "5",
    "pcie_width": "16",
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "throughput": [
        {
            "model": "tiny",
            "method": method,
            "context": 1024,
            "batch": 2,
            "rows_per_step": 1,
            "device": "cpu",
            "dtype": "float32",
            "steps": 4,
            "step_ms": [10.0, 11.0, 12.0, 20.0],
            "prefill_s": 1.5,
            "tokens_per_s": 173.9,
            "hit_rate": hit_rate,
            "attended_share": 1.0,
            "attended_share_basis": "64 of 64 units in 4 untimed steps",
            "remark": "",
            "urgent_bytes_per_step": 2**20,
            "prefetched_bytes_per_step": 0,
            "kv_gpu_bytes": 2**22,
            "host_bytes": 2**24,
        }
        for method, hit_rate in (("full_kv", None), ("dualdecoder", 0.875))
    ],
    "residency": [
        {
            "model": "llama-3.1-8b",
            "context": 131072,
            "method": method,
            "dtype": "bfloat16",
            "budget": budget,
            "batch": 1,
            "gpu": categories,
            "host": {"kv": 16 * GIB},
            "gpu_total": sum(categories.values()),
            "host_total": 16 * GIB,
            "per_sequence_gpu": 2 * GIB,
            "cap_bytes": 80 * GIB,
            "largest_batch": largest,
        }
        for method, budget, categories, largest in (
            ("full_kv", None, {"weights": 15 * GIB, "kv": 16 * GIB}, 0),
            ("dualdecoder", 2048, {"weights": 15 * GIB, "landmarks": 2 * GIB}, 32),
        )
    ],
    "prediction": [
        {
            "prompt": "continue",
            "speculation": "self",
            "scope": scope,
            "layer": layer,
            "step": step,
            "kv_accuracy": accuracy,
            "reuse": 0.88,
            "token_accuracy": None,
            "model": "tiny",
            "context": 1024,
            "budget": 256,
            "steps": 16,
        }
        for scope, layer, step, accuracy in (
            ("all", None, None, 0.7),
            ("layer", 0, None, 0.9),
            ("layer", 1, None, 0.5),
            ("step", None, 0, 0.6),
            ("step", None, 1, 0.8),
        )
    ],
    "ruler": [
        {
            "task": "vt",
            "length": 1024,
            "method": method,
            "model": "tiny",
            "budget": budget,
            "score": 75.0,
            "scores": [50.0, 100.0],
            "samples": 2,
            "ci95": [50.0, 100.0],
            "attended_tokens": budget,
        }
        for method, budget in (("full_kv", None), ("dualdecoder", 256))
    ],
    "fidelity": [
        {
            "model": "tiny",
            "method": method,
            "budget": budget,
            "attended_tokens": budget,
            "context": 1024,
            "steps": 33,
            "texts": 2,
            "kl_mean": kl,
            "kl_p99": 10 * kl,
            "top1_agreement": 1 - kl,
            "attention_mass": mass,
        }
        for method, budget, kl, mass in (
            ("dualdecoder", 256, 0.01, 0.99),
            ("dualdecoder", 64, 0.05, 0.9),
            ("full_kv", None, 0.0, None),
        )
    ],
    "lm_eval": [
        {
            "task": "everyday",
            "metric": "acc",
            "model": "tiny",
            "method": "full_kv",
            "budget": None,
            "value": 0.75,
            "stderr": None,
            "samples": 4,
        }
    ],
}


@pytest.fixture
def rows() -> dict[str, list[dict[str, Any]]]:
    """Valid rows of each experiment."""
    return copy.deepcopy(ROWS)


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Write a finished record of an experiment below tmp_path; keywords replace its fields."""

    def put_record(experiment: str, name: str = "a", **fields: Any) -> Path:
        defaults = {
            "config": {"model": "tiny"},
            "environment": dict(CPU_ENVIRONMENT),
            "command": f"python -m experiments.{experiment} model=tiny",
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:01:00+00:00",
            "seconds": 60.0,
            "status": "ok",
            "rows": copy.deepcopy(ROWS.get(experiment, [])),
        }
        path = tmp_path / experiment / f"{name}.json"
        write_record(path, Record(experiment=experiment, point=name, **{**defaults, **fields}))
        return path

    return put_record


@pytest.fixture
def gpu_environment() -> dict[str, Any]:
    """The environment of a machine with one GPU."""
    return {**CPU_ENVIRONMENT, "gpu": [dict(GPU)]}
