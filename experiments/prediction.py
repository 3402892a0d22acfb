"""Prediction accuracy of the speculated row on a real model (Fig. 7a by step and layer, Fig. 7b by seed).

    python -m experiments.prediction prompt=question context=8000 budget=512
    python -m experiments.prediction -m budget=128,256,512

KV accuracy: share of a step's true selection that the step before predicted. Reuse: share that was selected in the
step before anyway. Token accuracy: the speculated token was the true one. Means over steps, layers and KV heads.
An answer that ends before ``steps`` ends the measurement; a row's ``steps`` are those that were taken.
Beside them, what chunk caches of several sizes would have missed on the same selections, with and without fetching the
prediction ahead: what prediction has to beat, and what it adds.
"""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from dualdecoder.config import SPECULATIONS
from dualdecoder.errors import require
from dualdecoder.method import method_config
from dualdecoder.prefill import PrefillSnapshot
from dualdecoder.telemetry import FIELDS
from experiments.harness.cache_simulation import Shares, last_set_shares, lru_shares, optimal_shares
from experiments.harness.checks import check_context, check_text_model, is_number, require_list, require_positive
from experiments.harness.points import run_point
from experiments.harness.workload import engine_for, manual_prompt, progress, question_prompt
from experiments.reporting.terminal import show_point

# Of the speculations, those with a second row.
SEEDS = tuple(name for name in SPECULATIONS if name != "none")
PROMPTS = {"continue": manual_prompt, "question": question_prompt}


@hydra.main(version_base="1.3", config_path="../conf", config_name="prediction")
def main(cfg: DictConfig) -> None:
    """Record and print one context and budget, all speculation seeds on one prefill."""
    show_point(run_point("prediction", cfg, measure, check=check))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require(cfg.prompt in PROMPTS, "prompt", cfg.prompt, ", ".join(PROMPTS))
    require_positive(cfg, "context", "steps")
    require(cfg.steps >= 2, "steps", cfg.steps, "at least 2: the first has none before it")
    require_list(cfg, "capacities", lambda multiple: is_number(multiple) and multiple >= 1, "numbers of 1 or more each")
    require_list(cfg, "speculations", lambda name: name in SEEDS, f"one or more of {', '.join(SEEDS)}, in []")
    config = method_config("dualdecoder", {"budget": cfg.budget})
    least = config.local + config.chunk
    require(cfg.context >= least, "context", cfg.context, f"at least {least} tokens: with fewer nothing is selected")
    check_context(cfg, check_text_model(cfg), "context", more=cfg.steps + 1)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """Rows for every speculation: over all, by layer, by step, by cache."""
    check(cfg)
    engine = engine_for(cfg.model, "dualdecoder", {"budget": cfg.budget})
    snapshot = engine.prefill(PROMPTS[cfg.prompt](engine, cfg.context))
    rows = [row for speculation in cfg.speculations for row in _rows(cfg, snapshot, speculation)]
    common = {"model": cfg.model.name, **{key: cfg[key] for key in ("prompt", "context", "budget")}}
    return [{**row, **common} for row in rows]


@dataclass
class Trace:
    """What a greedy run selected and predicted; steps are those with two rows.

    counts_SLF: the counters' growth, by step, layer and field. right_S: whether the speculated token was the true one.
    true, predicted: by step and layer in one list, the sets ``[KV heads, selected chunks]``. chunks: of the context.
    """

    counts_SLF: Tensor
    right_S: list[bool]
    true: list[np.ndarray]
    predicted: list[np.ndarray]
    chunks: int

    def sets(self) -> tuple[np.ndarray, np.ndarray]:
        """True and predicted sets, ``[steps, layers * KV heads, selected chunks]``."""
        steps = len(self.right_S)
        return tuple(np.stack(sets).reshape(steps, -1, sets[0].shape[-1]) for sets in (self.true, self.predicted))


@dataclass
class SetRecorder:
    """Watches a method's selections of one sequence and lets them be."""

    true: list[np.ndarray] = field(default_factory=list)
    predicted: list[np.ndarray] = field(default_factory=list)

    def __call__(self, layer: int, chosen_BKS: Tensor, predicted_BKS: Tensor) -> tuple[Tensor, Tensor]:
        self.true.append(chosen_BKS[0].numpy().copy())
        self.predicted.append(predicted_BKS[0].numpy().copy())
        return chosen_BKS, predicted_BKS


def _rows(cfg: DictConfig, snapshot: PrefillSnapshot, speculation: str) -> list[dict[str, Any]]:
    seen = trace(cfg, snapshot, speculation)
    counts_SLF, right_S = seen.counts_SLF, seen.right_S
    allowed = f"one with a longer answer: this one ends after {len(right_S) + 1} tokens, 3 are needed"
    require(len(right_S) >= 2, "prompt", cfg.prompt, allowed)
    by_layer = [_row(speculation, counts_LF, layer=layer) for layer, counts_LF in enumerate(counts_SLF.sum(0))]
    # The first step has no step before it to be predicted by.
    by_step = [
        _row(speculation, counts_SLF[step].sum(0), step=step, token_accuracy=float(right_S[step]))
        for step in range(1, len(right_S))
    ]
    total = _row(speculation, counts_SLF.sum((0, 1)), token_accuracy=fmean(right_S[1:]))
    rows = [total, *by_layer, *by_step, *_cache_rows(cfg, seen, speculation)]
    return [{**row, "steps": len(right_S)} for row in rows]


def trace(cfg: DictConfig, snapshot: PrefillSnapshot, speculation: str) -> Trace:
    """Decode greedily and watch, up to the end of the answer."""
    engine = engine_for(cfg.model, "dualdecoder", {"budget": cfg.budget, "speculation": speculation})
    run = engine.resume([snapshot], cfg.steps + 1, stop_ids=engine.stop_ids)
    recorder, telemetry, right = SetRecorder(), run.method.telemetry, []
    run.method.rewrite = recorder
    counts = [telemetry.counts.clone()]
    for step in progress(run.steps, f"prediction {speculation}", total=cfg.steps):
        counts.append(telemetry.counts.clone())
        right.append(step.speculated[0])
    # The single-row step before them selects as well.
    first = run.method.model.layers
    sets = recorder.true[first:], recorder.predicted[first:]
    return Trace(torch.stack(counts).diff(dim=0), right, *sets, run.method.chunks)


def _cache_rows(cfg: DictConfig, seen: Trace, speculation: str) -> list[dict[str, Any]]:
    """Misses with nothing but the last set, and with caches of multiples of the budget, without and with prefetch."""
    true_THS, predicted_THS = seen.sets()
    sizes = [(multiple, round(multiple * true_THS.shape[-1])) for multiple in cfg.capacities]
    rows = []
    for prefetch, fetched in ((False, None), (True, predicted_THS)):
        rows.append(_cache_row(speculation, "last set", 1, prefetch, last_set_shares(true_THS, fetched)))
        for multiple, size in sizes:
            shares = lru_shares(true_THS, seen.chunks, size, fetched)
            rows.append(_cache_row(speculation, "LRU", multiple, prefetch, shares))
    for multiple, size in sizes:
        shares = optimal_shares(true_THS, seen.chunks, size)
        rows.append(_cache_row(speculation, "optimum", multiple, False, shares))
    return rows


def _cache_row(speculation: str, cache: str, capacity: float, prefetch: bool, shares: Shares) -> dict[str, Any]:
    names = {"speculation": speculation, "scope": "cache", "cache": cache, "capacity": capacity, "prefetch": prefetch}
    return {**names, "misses": shares.misses, "prefetched": shares.prefetched}


def _row(speculation: str, counts_F: Tensor, **where: Any) -> dict[str, Any]:
    count = dict(zip(FIELDS, counts_F.tolist(), strict=True))
    scope = next((name for name in ("layer", "step") if name in where), "all")
    row = {"speculation": speculation, "scope": scope, "layer": None, "step": None, "token_accuracy": None, **where}
    shares = {"kv_accuracy": count["predicted"], "reuse": count["reused"]}
    return {**row, **{name: value / count["comparable"] for name, value in shares.items()}}


if __name__ == "__main__":
    main()
