"""Points that share a process on a GPU: the second one finds the memory of the first."""

import gc
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from dualdecoder.method import REGISTRY
from experiments import method_time
from experiments.harness.gpu import LinkRate
from experiments.harness.isolate import measure_here

pytestmark = pytest.mark.gpu

CONF = Path(__file__).resolve().parents[2] / "conf"
SMALL = ("model=tiny", "model.dtype=bfloat16", "context=4000", "batch=4", "budget=64", "warmup=1", "steps=4")


def measure(cfg: DictConfig) -> list[dict]:
    return [method_time.measure_on(cfg, "cuda", 1e12, LinkRate(1e10, "made up"))]


def measure_one(method: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("method_time", [*SMALL, f"method={method}"])
    outcome = measure_here(measure, cfg)
    assert outcome.error is None, outcome.error
    assert outcome.rows[0]["outcome"] == "measured"


@pytest.mark.parametrize("method", REGISTRY)
def test_a_point_leaves_nothing_on_the_card(method: str) -> None:
    """Without the collector, so that a method's last reference is what frees it. The first point warms libraries up."""
    measure_one(method)
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        measure_one(method)
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()
