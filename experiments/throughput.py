"""Decode speed of one method at one context and batch (Table 1). Prefill is timed apart and real.

    python -m experiments.throughput method=full_kv context=4096
    python -m experiments.throughput -m method=full_kv,dualdecoder batch=1,4

On a CPU this times the PyTorch reference: it shows that the harness works, never how fast a GPU is.
"""

from itertools import islice
from statistics import median
from typing import Any

import hydra
from omegaconf import DictConfig

from dualdecoder.engine import Run
from experiments.harness.attended import OBSERVED_STEPS, attended_share
from experiments.harness.checks import check_context, check_method, check_text_model, require_positive
from experiments.harness.points import run_point
from experiments.harness.workload import engine_for, manual_prompt, method_setting, progress
from experiments.reporting.terminal import show_point


@hydra.main(version_base="1.3", config_path="../conf", config_name="throughput")
def main(cfg: DictConfig) -> None:
    """Record and print one model, method, context and batch."""
    show_point(run_point("throughput", cfg, measure, check=check))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_positive(cfg, "context", "batch", "warmup", "steps")
    check_context(cfg, check_text_model(cfg), "context", more=cfg.warmup + cfg.steps + OBSERVED_STEPS + 1)
    check_method(cfg.method, "cpu")


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row with every step's time in ms after the warm-up steps."""
    check(cfg)
    engine = engine_for(cfg.model, cfg.method.name, cfg.method.options)
    prompts = [manual_prompt(engine, cfg.context, offset=b * cfg.context) for b in range(cfg.batch)]
    run = engine.start(prompts, cfg.warmup + cfg.steps + OBSERVED_STEPS + 1)
    step_ms, moved = _decode(run, cfg)
    method, attended = run.method, attended_share(run.method, lambda: next(run.steps))
    plan = method.ledger.plan()
    return [
        {
            "model": cfg.model.name,
            "method": method_setting(cfg)["label"],
            "context": cfg.context,
            "batch": cfg.batch,
            "rows_per_step": method.rows,
            "device": engine.model.device.type,
            "dtype": cfg.model.dtype,
            "steps": cfg.steps,
            "step_ms": step_ms,
            "prefill_s": run.prefill_s,
            "tokens_per_s": cfg.batch / median(step_ms) * 1e3,
            **attended.columns(),
            "remark": method.remark(),
            # A context no longer than what stays on the device anyway has nothing to select.
            "hit_rate": moved["hit"] / moved["selected"] if moved.get("selected") and "hit" in moved else None,
            "urgent_bytes_per_step": moved.get("urgent_bytes", 0.0),
            "prefetched_bytes_per_step": moved.get("prefetched_bytes", 0.0),
            "kv_gpu_bytes": plan.gpu_total,
            "host_bytes": plan.host_total,
        }
    ]


def _decode(run: Run, cfg: DictConfig) -> tuple[list[float], dict[str, float]]:
    """Times of the measured steps, and how much each counter grew a step in them."""
    step_ms: list[float] = []
    total = cfg.warmup + cfg.steps
    for number, step in enumerate(progress(islice(run.steps, total), "throughput", total=total), start=1):
        if number > cfg.warmup:
            step_ms.append(step.seconds * 1e3)
        elif number == cfg.warmup:
            before = run.method.statistics()
    moved = {key: (value - before.get(key, 0)) / cfg.steps for key, value in run.method.statistics().items()}
    return step_ms, moved


if __name__ == "__main__":
    main()
