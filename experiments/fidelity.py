"""How close a method's next-token distributions stay to full KV's, token by token over a long text, by budget.

    python -m experiments.fidelity context=4096 'methods=[dualdecoder,streaming_llm]' 'budgets=[64,256,1024]'

Sharper than a score of a weak model: every method is forced along the same text from one prefill, and each of its
distributions is compared with full KV's. KL divergence is KL(full KV || method) in nats; the first token's distribution
comes from the prefill, which all share, and is left out. Attention mass is the part of dense attention that the
selected set holds, for methods whose sets can be seen (``harness/attention_mass.py``).
Suffixes: S steps, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dualdecoder.engine import Engine
from dualdecoder.errors import require
from dualdecoder.method import KVMethod
from dualdecoder.prefill import PrefillSnapshot
from experiments.harness.attention_mass import MassWatch, can_watch
from experiments.harness.checks import (
    check_context,
    check_device,
    check_method,
    check_methods,
    check_text_model,
    require_positive,
    require_positive_list,
)
from experiments.harness.points import run_point
from experiments.harness.teacher import forced_logits
from experiments.harness.workload import (
    engine_for,
    manual_prompt,
    progress,
    with_methods,
    with_value,
)
from experiments.reporting.terminal import show_point


@hydra.main(version_base="1.3", config_path="../conf", config_name="fidelity")
def main(cfg: DictConfig) -> None:
    """Record and print one context, all methods and budgets."""
    show_point(run_point("fidelity", cfg, measure, check=check, prepare=with_methods))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_positive(cfg, "context", "steps", "texts")
    require(cfg.steps >= 2, "steps", cfg.steps, "at least 2: the first token's distribution is the prefill's")
    require_positive_list(cfg, "budgets")
    check_device(cfg.device)
    check_methods(cfg, cfg.device)
    for label, method in cfg.methods.items():
        for budget in cfg.budgets:
            check_method(method, cfg.device, _options(cfg, label, budget))
    check_context(cfg, check_text_model(cfg, cfg.dtype), "context", more=cfg.steps)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row a method and budget; a method whose options do not depend on the budget has one row."""
    cfg = with_methods(cfg)
    check(cfg)
    full = engine_for(cfg.model, "full_kv", {}, cfg.device, cfg.dtype)
    engines = _engines(cfg)
    compared: dict[tuple[str, int | None], list[Comparison]] = {key: [] for key in engines}
    for number in range(cfg.texts):
        text = manual_prompt(full, cfg.context + cfg.steps, offset=number * (cfg.context + cfg.steps))
        snapshot, following = full.prefill(text[: cfg.context]), text[cfg.context :]
        expected_SV = _log_probabilities(full, snapshot, following)
        for key in progress(engines, f"fidelity {cfg.context} text {number + 1}", total=len(engines)):
            compared[key].append(compare(engines[key], snapshot, following, expected_SV))
    return [_row(cfg, key, engine, compared[key]) for key, engine in engines.items()]


def _engines(cfg: DictConfig) -> dict[tuple[str, int | None], Engine]:
    """Engines by method and budget."""
    found: dict[tuple[str, int | None], Engine] = {}
    for label in cfg.methods:
        options = {budget: _options(cfg, label, budget) for budget in cfg.budgets}
        varies = len({str(chosen) for chosen in options.values()}) > 1 or "budget" in str(cfg.methods[label])
        for budget, chosen in options.items() if varies else [(None, options[cfg.budgets[0]])]:
            found[label, budget] = engine_for(cfg.model, cfg.methods[label].name, chosen, cfg.device, cfg.dtype)
    return found


def _options(cfg: DictConfig, label: str, budget: int) -> dict[str, Any]:
    """Options of a method with this budget wherever they refer to one."""
    return OmegaConf.to_container(with_value(cfg, "budget", budget).methods[label].options, resolve=True)


@dataclass(frozen=True)
class Comparison:
    """One method along one text: divergence and agreement at each step, and the attention mass if it can be seen."""

    kl_S: Tensor
    agrees_S: Tensor
    mass: float | None


def compare(engine: Engine, snapshot: PrefillSnapshot, following: list[int], expected_SV: Tensor) -> Comparison:
    """Force the method along ``following``; ``expected_SV`` are full KV's log-probabilities."""
    watches: list[MassWatch] = []

    def watch(method: KVMethod) -> None:
        if can_watch(method):
            watches.append(MassWatch(method, snapshot))

    got_SV = _log_probabilities(engine, snapshot, following, watch)
    kl_S = (expected_SV.exp() * (expected_SV - got_SV)).sum(dim=-1)
    mass = fmean(watches[0].masses) if watches else None
    return Comparison(kl_S, expected_SV.argmax(dim=-1) == got_SV.argmax(dim=-1), mass)


def _log_probabilities(
    engine: Engine,
    snapshot: PrefillSnapshot,
    following: list[int],
    watch: Callable[[KVMethod], None] = lambda method: None,
) -> Tensor:
    """fp32 log-probabilities ``[S, V]`` of all decoded steps, on the CPU."""
    steps = islice(forced_logits(engine, [snapshot], [following], watch), 1, None)
    return torch.stack([logits_BV[0].log_softmax(dim=-1).cpu() for logits_BV in steps])


def _row(cfg: DictConfig, key: tuple[str, int | None], engine: Engine, compared: list[Comparison]) -> dict[str, Any]:
    kl = torch.cat([item.kl_S for item in compared]).double()
    masses = [item.mass for item in compared if item.mass is not None]
    return {
        "model": cfg.model.name,
        "method": key[0],
        "budget": key[1],
        "attended_tokens": getattr(engine.config, "attended_tokens", None),
        **{name: cfg[name] for name in ("context", "steps", "texts")},
        "kl_mean": float(kl.mean()),
        "kl_p99": float(kl.quantile(0.99)),
        "top1_agreement": float(torch.cat([item.agrees_S for item in compared]).double().mean()),
        # A sum of probabilities may round to a little more than the whole.
        "attention_mass": min(1.0, fmean(masses)) if masses else None,
    }


if __name__ == "__main__":
    main()
