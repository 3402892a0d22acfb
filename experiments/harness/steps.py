"""Whole decode steps of any method with random weights and KV: their times, what crossed the link, and the floors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from dualdecoder.checkpoints import load_model, weights_id
from dualdecoder.config import dtype_from_name
from dualdecoder.graphs import WARMUP_STEPS, StepRunner
from dualdecoder.method import KVMethod
from dualdecoder.model import Decoder
from experiments.harness.attended import OBSERVED_STEPS, AttendedShare, attended_share
from experiments.harness.memory import keep_last

# Steps beside the warm-up and the measured ones: those before the capture, those observed, and one to spare.
EXTRA_STEPS = WARMUP_STEPS + OBSERVED_STEPS + 1


@dataclass(frozen=True)
class Steps:
    """Milliseconds of each step, and each counter's growth per step; ``graph``: replayed from a CUDA graph.

    attended: what share of the true set steps like these attend to.
    """

    step_ms: list[float]
    grown: dict[str, float]
    graph: bool
    attended: AttendedShare

    @property
    def median_ms(self) -> float:
        return median(self.step_ms)

    @property
    def link_bytes(self) -> float:
        """Bytes a step that crossed the link to the device; 0 for a method that counts none."""
        return self.grown.get("urgent_bytes", 0) + self.grown.get("prefetched_bytes", 0)

    @property
    def hit_rate(self) -> float | None:
        """Share of the selection that was on the device when needed; None for a method that counts no selection."""
        selected = self.grown.get("selected", 0)
        return self.grown["hit"] / selected if selected and "hit" in self.grown else None


@dataclass(frozen=True)
class Floors:
    """Bytes that a step has to move, and the times in ms that these take at the measured rates (bytes per second)."""

    link_bytes: float
    hbm_bytes: float
    copy_rate: float
    link_rate: float

    @property
    def link_ms(self) -> float:
        return self.link_bytes / self.link_rate * 1e3

    @property
    def hbm_ms(self) -> float:
        return self.hbm_bytes / self.copy_rate * 1e3


@keep_last(key=lambda source, dtype, device: (weights_id(source), dtype, device))
def model_of(source: str, dtype: str, device: str) -> Decoder:
    """The model, kept for the next point of a sweep."""
    return load_model(source, dtype_from_name(dtype), device)


def step_floors(model: Decoder, method: KVMethod, steps: Steps, copy_rate: float, link_rate: float) -> Floors:
    """Floors of a method's step at its present lengths. Without transfers, nothing has to cross the link."""
    link_bytes = steps.link_bytes if method.transfers else 0
    return Floors(link_bytes, model.step_weight_bytes() + method.read_bytes(), copy_rate, link_rate)


def time_steps(model: Decoder, method: KVMethod, warmup: int, steps: int) -> Steps:
    """Take ``WARMUP_STEPS + warmup`` full steps, then time ``steps`` of them: by CUDA events, or by the clock on a CPU.

    Every step commits one token of every sequence. All run at the same position, which costs what any other costs.
    After the timed steps come ``OBSERVED_STEPS`` that are not timed.
    """
    run = StepRunner(model, method)
    tokens_BR = torch.randint(model.config.vocabulary, (method.batch, method.rows), device=model.device)
    everyone_B = torch.ones(method.batch, dtype=torch.bool, device=model.device)
    position_B = torch.full((method.batch,), method.context - method.rows, device=model.device)

    def step() -> None:
        run(tokens_BR, position_B, everyone_B)

    for _ in range(WARMUP_STEPS + warmup):
        step()
    before = method.statistics()
    step_ms = (_gpu_times if model.device.type == "cuda" else _cpu_times)(step, steps)
    after = method.statistics()
    grown = {name: (after[name] - before[name]) / steps for name in after}
    return Steps(step_ms, grown, run.graph is not None, attended_share(method, step))


def _gpu_times(step: Callable[[], None], count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _cpu_times(step: Callable[[], None], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times
