"""Prediction accuracy of the speculated row on a real model (Fig. 7a by step and layer, Fig. 7b by seed).

    python -m experiments.prediction prompt=question context=8000 budget=512
    python -m experiments.prediction -m budget=128,256,512

KV accuracy: share of a step's true selection that the step before predicted. Reuse: share that was selected in the
step before anyway. Token accuracy: the speculated token was the true one. Means over steps, layers and KV heads.
"""

from statistics import fmean
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.prefill import PrefillSnapshot
from dualdecoder.telemetry import FIELDS
from experiments.harness.points import run_point
from experiments.harness.workload import engine_for, manual_prompt, progress, question_prompt, require_positive
from experiments.reporting.terminal import show_point

PROMPTS = {"continue": manual_prompt, "question": question_prompt}


@hydra.main(version_base="1.3", config_path="../conf", config_name="prediction")
def main(cfg: DictConfig) -> None:
    """Record and print one context and budget, all speculation seeds on one prefill."""
    show_point(run_point("prediction", cfg, measure))


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """Rows for every speculation: over all, by layer, by step."""
    engine = engine_for(cfg.model, "dualdecoder", {"budget": cfg.budget})
    require(cfg.prompt in PROMPTS, "prompt", cfg.prompt, ", ".join(PROMPTS))
    require_positive(cfg, "context", "steps")
    require(cfg.steps >= 2, "steps", cfg.steps, "at least 2: the first has none before it")
    snapshot = engine.prefill(PROMPTS[cfg.prompt](engine, cfg.context))
    rows = [row for speculation in cfg.speculations for row in _rows(cfg, snapshot, speculation)]
    common = {"model": cfg.model.name, **{key: cfg[key] for key in ("prompt", "context", "budget", "steps")}}
    return [{**row, **common} for row in rows]


def _rows(cfg: DictConfig, snapshot: PrefillSnapshot, speculation: str) -> list[dict[str, Any]]:
    counts_SLF, tokens_S = trace(cfg, snapshot, speculation)
    by_layer = [_row(speculation, counts_LF, layer=layer) for layer, counts_LF in enumerate(counts_SLF.sum(0))]
    # The first step has no step before it to be predicted by.
    by_step = [
        _row(speculation, counts_SLF[step].sum(0), step=step, token_accuracy=float(tokens_S[step]))
        for step in range(1, len(tokens_S))
    ]
    return [_row(speculation, counts_SLF.sum((0, 1)), token_accuracy=fmean(tokens_S[1:])), *by_layer, *by_step]


def trace(cfg: DictConfig, snapshot: PrefillSnapshot, speculation: str) -> tuple[Tensor, list[bool]]:
    """Decode greedily; counters ``[steps, layers, fields]`` of each step and whether its speculated token was right."""
    engine = engine_for(cfg.model, "dualdecoder", {"budget": cfg.budget, "speculation": speculation})
    run = engine.resume([snapshot], cfg.steps + 1)
    telemetry, tokens = run.method.telemetry, []
    counts = [telemetry.counts.clone()]
    for step in progress(run.steps, f"prediction {speculation}", total=cfg.steps):
        counts.append(telemetry.counts.clone())
        tokens.append(step.speculated[0])
    return torch.stack(counts).diff(dim=0), tokens


def _row(speculation: str, counts_F: Tensor, **where: Any) -> dict[str, Any]:
    count = dict(zip(FIELDS, counts_F.tolist(), strict=True))
    scope = next((name for name in ("layer", "step") if name in where), "all")
    row = {"speculation": speculation, "scope": scope, "layer": None, "step": None, "token_accuracy": None, **where}
    shares = {"kv_accuracy": count["predicted"], "reuse": count["reused"]}
    return {**row, **{name: value / count["comparable"] for name, value in shares.items()}}


if __name__ == "__main__":
    main()
