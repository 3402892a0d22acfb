"""Whole decode steps of DualDecoder on a GPU: time, floors, and how much of the transfers is exposed.

    python -m experiments.step_time batch=8
    python -m experiments.step_time -m batch=1,4,8,16,24

Weights and KV are random, so the selection is a seeded process with a given reuse and prediction accuracy; scoring and
top-S run in full. Host sequences may be fewer than the batch: the record says how many.
"""

from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from dualdecoder.config import DualDecoderConfig, dtype_from_name
from dualdecoder.dual import DualDecoder
from dualdecoder.model import Decoder
from dualdecoder.selection_replay import REPLAYED_SETS, ReplayConfig, replay_selection
from experiments.harness.checks import (
    check_model,
    check_synthetic,
    require_gpu,
    require_natural,
    require_positive,
    require_shares,
)
from experiments.harness.gpu import gather_rate, measured_rates
from experiments.harness.points import run_point
from experiments.harness.steps import EXTRA_STEPS, model_of, step_floors, time_steps
from experiments.harness.workload import progress
from experiments.reporting.terminal import show_point

# (name, prefetch, missing chunks read in place, transfers): the method as it is, with the other way to the missing
# chunks, fetching only on demand, and no transfers at all.
VARIANTS = (
    ("layer_aware", True, False, True),
    ("layer_aware, in place", True, True, True),
    ("on_demand", False, False, True),
    ("compute_only", True, False, False),
)


@hydra.main(version_base="1.3", config_path="../conf", config_name="step_time")
def main(cfg: DictConfig) -> None:
    """Record and print one batch and context."""
    show_point(run_point("step_time", cfg, measure, check=check))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_positive(cfg, "context", "batch", "warmup", "steps", "host_sequences")
    require_natural(cfg, "seed")
    require_shares(cfg, "reuse", "accuracy")
    check_model(cfg)
    check_synthetic(cfg, DualDecoderConfig(budget=cfg.budget), decoded=_decoded(cfg) + 1, sets=REPLAYED_SETS)


def _decoded(cfg: DictConfig) -> int:
    """Tokens that all variants decode together."""
    return len(VARIANTS) * (cfg.warmup + cfg.steps + EXTRA_STEPS)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a variant."""
    check(cfg)
    require_gpu()
    dtype = dtype_from_name(cfg.model.dtype)
    rates = measured_rates()
    torch.cuda.empty_cache()
    model = model_of(cfg.model.source, cfg.model.dtype, "cuda")
    config = DualDecoderConfig(budget=cfg.budget, host_sequences=min(cfg.host_sequences, cfg.batch))
    before = torch.cuda.memory_allocated()
    sizes = {"batch": cfg.batch, "context": cfg.context, "dtype": dtype}
    method = DualDecoder(model.config, config, **sizes, device="cuda")
    held = torch.cuda.memory_allocated() - before
    method.fill_synthetic(cfg.context - _decoded(cfg) - 1, cfg.seed)
    replay_selection(method, ReplayConfig(cfg.reuse, cfg.accuracy, cfg.seed))
    gather = gather_rate(method.host.record_bytes)
    rows = [_row(cfg, model, method, variant, rates.copy, gather) for variant in progress(VARIANTS, "step_time")]
    compute_ms = next(row["median_ms"] for row in rows if row["variant"] == "compute_only")
    plan = method.ledger.plan()
    extra = {"link_rate": rates.link, "allocated_bytes": held, "ledger_bytes": plan.gpu_total, "gpu": plan.gpu}
    return [{**row, **_overlap(row, compute_ms), **extra} for row in rows]


def _overlap(row: dict[str, Any], compute_ms: float) -> dict[str, float]:
    """Time that the transfers add, and how near the step is to the longer of its link floor and its compute time."""
    bound_ms = max(row["link_floor_ms"], compute_ms)
    return {"exposed_ms": row["median_ms"] - compute_ms, "overlap_efficiency": bound_ms / row["median_ms"]}


def _row(
    cfg: DictConfig,
    model: Decoder,
    method: DualDecoder,
    variant: tuple[str, bool, bool, bool],
    copy: float,
    gather: float,
) -> dict[str, Any]:
    name, method.prefetches, method.in_place, method.transfers = variant
    steps = time_steps(model, method, cfg.warmup, cfg.steps)
    floors = step_floors(model, method, steps, copy, gather)
    return {
        "variant": name,
        "model": cfg.model.name,
        "context": cfg.context,
        "batch": cfg.batch,
        "budget": cfg.budget,
        "selection": f"synthetic(reuse={cfg.reuse}, accuracy={cfg.accuracy}, seed={cfg.seed})",
        "host_kv": f"aliased({len(method.host.records[0])})",
        **steps.attended.columns(),
        "step_ms": steps.step_ms,
        "median_ms": steps.median_ms,
        "tokens_per_s": cfg.batch / steps.median_ms * 1e3,
        "link_bytes": floors.link_bytes,
        "hbm_bytes": floors.hbm_bytes,
        "copy_rate": copy,
        "gather_rate": gather,
        "link_floor_ms": floors.link_ms,
        "hbm_floor_ms": floors.hbm_ms,
        "hit_rate": steps.hit_rate,
    }


if __name__ == "__main__":
    main()
