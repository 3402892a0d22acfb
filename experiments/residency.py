"""Memory residency: bytes by category and the largest batch under the cap, from ``plan()`` (Fig. 2, 4, 5).

python -m experiments.residency model=qwen2.5-14b context=65536
python -m experiments.residency -m context=65536,131072,262144,524288
"""

from typing import Any

import hydra
from omegaconf import DictConfig

from dualdecoder.config import ModelConfig, dtype_from_name
from dualdecoder.errors import require
from dualdecoder.ledger import MemoryPlan
from dualdecoder.method import method_config
from dualdecoder.model import planned_weight_bytes
from dualdecoder.planning import activation_bytes, plan_memory
from experiments.harness.checks import check_model, is_number, plain, require_positive
from experiments.harness.model_names import shape_in
from experiments.harness.points import run_point
from experiments.harness.workload import with_methods
from experiments.reporting.terminal import show_point

IDEAL = "ideal"


@hydra.main(version_base="1.3", config_path="../conf", config_name="residency")
def main(cfg: DictConfig) -> None:
    """Record and print one model and context, all methods."""
    show_point(run_point("residency", cfg, measure, prepare=with_methods, check=check, weights=False))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be planned."""
    require_positive(cfg, "context", "batch")
    cap = cfg.hardware.gpu_budget_gib
    require(is_number(cap) and cap > 0, "hardware.gpu_budget_gib", cap, "a positive number")
    check_model(cfg)
    for method in cfg.methods.values():
        method_config(method.name, plain(method.options))


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a method, and one for ``ideal``: weights and activations only (the paper's bound, not a system)."""
    cfg = with_methods(cfg)
    check(cfg)
    cap = int(cfg.hardware.gpu_budget_gib * 2**30)
    return [_row(cfg, method, cap) for method in (IDEAL, *cfg.methods)]


def _row(cfg: DictConfig, label: str, cap: int) -> dict[str, Any]:
    plan = _plan(cfg, label, cfg.batch)
    return {
        "model": cfg.model.name,
        "context": cfg.context,
        "method": label,
        "dtype": cfg.model.dtype,
        "budget": cfg.budget if label != IDEAL and "budget" in cfg.methods[label].options else None,
        "batch": cfg.batch,
        "gpu": plan.gpu,
        "host": plan.host,
        "gpu_total": plan.gpu_total,
        "host_total": plan.host_total,
        "per_sequence_gpu": _plan(cfg, label, 2).gpu_total - _plan(cfg, label, 1).gpu_total,
        "cap_bytes": cap,
        "largest_batch": largest_batch(cfg, label, cap),
    }


def largest_batch(cfg: DictConfig, label: str, cap: int) -> int:
    """Most sequences whose planned device bytes stay within ``cap``; 0 if not even one fits."""
    if _plan(cfg, label, 1).gpu_total > cap:
        return 0
    fits, fails = 1, 2
    while _plan(cfg, label, fails).gpu_total <= cap:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if _plan(cfg, label, middle).gpu_total <= cap else (fits, middle)
    return fits


def _plan(cfg: DictConfig, label: str, batch: int) -> MemoryPlan:
    shape, dtype = shape_in(cfg.model), dtype_from_name(cfg.model.dtype)
    if label == IDEAL:
        return _ideal(shape, batch, dtype)
    method = cfg.methods[label]
    options = plain(method.options)
    return plan_memory(shape, method.name, method_config(method.name, options), batch, cfg.context, dtype)


def _ideal(shape: ModelConfig, batch: int, dtype: Any) -> MemoryPlan:
    weights, activations = planned_weight_bytes(shape, dtype), activation_bytes(shape, batch, dtype)
    return MemoryPlan({"weights": weights, "activations": activations})


if __name__ == "__main__":
    main()
