"""A child process owns one GPU, says what it measured on it, and may run out of its memory."""

from pathlib import Path

import pytest

from experiments.harness.child import load_measure
from experiments.harness.environment import visible_gpus
from experiments.harness.isolate import Outcome, measure_in_child

pytestmark = pytest.mark.gpu

SCRIPT = """
import os
import torch

def measure(cfg):
    held = torch.empty(cfg.gib * 2**30, dtype=torch.uint8, device="cuda")
    return [{"devices": torch.cuda.device_count(), "visible": os.environ["CUDA_VISIBLE_DEVICES"], "held": held.nbytes}]
"""


def run(folder: Path, gib: int) -> Outcome:
    (folder / "fill.py").write_text(SCRIPT)
    return measure_in_child(load_measure(folder / "fill.py", "measure"), {"gib": gib})


def test_a_point_has_one_gpu_and_its_rates_are_recorded(tmp_path: Path) -> None:
    outcome = run(tmp_path, 1)
    assert outcome.error is None
    assert outcome.rows == [{"devices": 1, "visible": visible_gpus()[0].uuid, "held": 2**30}]
    assert outcome.gpu["name"] == visible_gpus()[0].fields["name"]
    assert outcome.gpu["peak_bytes"] >= 2**30
    # Any link of a GPU in use, and any memory of one, is faster than this.
    assert outcome.gpu["link_bytes_per_s"] > 1e9 and outcome.gpu["copy_bytes_per_s"] > 1e10


def test_too_little_memory_on_the_gpu_is_told_apart_from_other_errors(tmp_path: Path) -> None:
    outcome = run(tmp_path, 1024)
    assert (outcome.rows, outcome.error["kind"], outcome.error["type"]) == ([], "memory", "OutOfMemoryError")
