"""Decode speed of one method at one context and batch (Table 1). Prefill is timed apart and real.

    python -m experiments.throughput method=full_kv context=4096
    python -m experiments.throughput -m method=full_kv,dualdecoder batch=1,4

On a CPU this times the PyTorch reference: it shows that the harness works, never how fast a GPU is.
"""

from statistics import median
from typing import Any

import hydra
from omegaconf import DictConfig

from dualdecoder.engine import Engine
from dualdecoder.method import KVMethod
from experiments.harness.points import run_point
from experiments.harness.workload import engine_for, manual_prompt, progress, require_positive
from experiments.reporting.terminal import show_point


@hydra.main(version_base="1.3", config_path="../conf", config_name="throughput")
def main(cfg: DictConfig) -> None:
    """Record and print one model, method, context and batch."""
    show_point(run_point("throughput", cfg, measure))


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row with every step's time in ms after the warm-up steps."""
    require_positive(cfg, "context", "batch", "warmup", "steps")
    engine = engine_for(cfg.model, cfg.method.name, cfg.method.options)
    prompts = [manual_prompt(engine, cfg.context, offset=b * cfg.context) for b in range(cfg.batch)]
    method, prefill_s, step_ms, before = _decode(engine, prompts, cfg)
    moved = {key: (value - before.get(key, 0)) / cfg.steps for key, value in method.statistics().items()}
    plan = method.ledger.plan()
    return [
        {
            "model": cfg.model.name,
            "method": cfg.method.name,
            "context": cfg.context,
            "batch": cfg.batch,
            "rows_per_step": method.rows,
            "device": engine.model.device.type,
            "dtype": cfg.model.dtype,
            "steps": cfg.steps,
            "step_ms": step_ms,
            "prefill_s": prefill_s,
            "tokens_per_s": cfg.batch / median(step_ms) * 1e3,
            "hit_rate": moved["hit"] / moved["selected"] if "hit" in moved else None,
            "urgent_bytes_per_step": moved.get("urgent_bytes", 0.0),
            "prefetched_bytes_per_step": moved.get("prefetched_bytes", 0.0),
            "kv_gpu_bytes": plan.gpu_total,
            "host_bytes": plan.host_total,
        }
    ]


def _decode(
    engine: Engine, prompts: list[list[int]], cfg: DictConfig
) -> tuple[KVMethod, float, list[float], dict[str, float]]:
    """The method after the run, prefill seconds, measured step times, and the counters when the warm-up ended."""
    run = engine.start(prompts, cfg.warmup + cfg.steps + 1)
    step_ms: list[float] = []
    for number, step in enumerate(progress(run.steps, "throughput", total=cfg.warmup + cfg.steps), start=1):
        if number > cfg.warmup:
            step_ms.append(step.seconds * 1e3)
        elif number == cfg.warmup:
            before = run.method.statistics()
    return run.method, run.prefill_s, step_ms, before


if __name__ == "__main__":
    main()
