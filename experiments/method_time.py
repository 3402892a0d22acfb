"""Whole decode steps of any method on a GPU: time, floors, efficiency, bytes. One row a method, context and batch.

    python -m experiments.method_time method=full_kv
    python -m experiments.method_time -m context=32768,124928 method=full_kv,full_offload,dualdecoder
    python -m experiments.method_time -m method=oasiskv,oasiskv_no_cap

Weights and KV are random. A method that selects chunks gets its selection from a seeded process with a given reuse and
prediction accuracy; its own scoring still runs in full. Where memory is too short for a method, the record says so.
After the timed steps a few more say what share of the step's true set is attended to (``harness/attended.py``).
"""

import dataclasses
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from dualdecoder.config import ChunkConfig, MethodConfig, dtype_from_name
from dualdecoder.errors import CapacityError, ContextError, require
from dualdecoder.method import KVMethod, method_class, method_config
from dualdecoder.model import Decoder
from dualdecoder.planning import check_memory
from dualdecoder.selection_replay import REPLAYED_SETS, ReplayConfig, replay_selection
from experiments.harness.checks import (
    check_model,
    check_synthetic,
    require_gpu,
    require_natural,
    require_positive,
    require_shares,
)
from experiments.harness.gpu import LinkRate, link_rate, measured_rates
from experiments.harness.points import run_point
from experiments.harness.rows import ROW_FIELDS
from experiments.harness.steps import EXTRA_STEPS, Steps, model_of, step_floors, time_steps
from experiments.harness.workload import method_setting
from experiments.reporting.terminal import show_point

OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, CapacityError)


@hydra.main(version_base="1.3", config_path="../conf", config_name="method_time")
def main(cfg: DictConfig) -> None:
    """Record and print one method, context and batch."""
    show_point(run_point("method_time", cfg, measure, check=check))


def check(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that cannot be measured."""
    require_positive(cfg, "context", "batch", "warmup", "steps")
    require_natural(cfg, "host_sequences", "seed")
    require_shares(cfg, "reuse", "accuracy")
    require("cuda" in method_class(cfg.method.name).devices, "method", cfg.method.name, "a method with GPU kernels")
    check_model(cfg)
    config, decoded = settings_of(cfg), _decoded(cfg)
    require(cfg.context > decoded, "context", cfg.context, f"more than the {decoded} tokens that are decoded")
    if isinstance(config, ChunkConfig):
        check_synthetic(cfg, config, decoded, sets=REPLAYED_SETS)


def measure(cfg: DictConfig) -> list[dict[str, Any]]:
    """One row; with ``outcome`` "out of memory" and no times if the weights and the method do not fit."""
    check(cfg)
    require_gpu()
    copy_rate = measured_rates().copy
    torch.cuda.empty_cache()
    try:
        return [measure_on(cfg, "cuda", copy_rate)]
    except ContextError:
        # More memory would not help.
        raise
    except OUT_OF_MEMORY as error:
        problem = str(error).splitlines()[0]
    # Outside the handler: the error's traceback holds the tensors that were there.
    torch.cuda.empty_cache()
    nothing = dict.fromkeys(ROW_FIELDS["method_time"])
    return [{**nothing, **_keys(cfg), "outcome": "out of memory", "problem": problem}]


def measure_on(cfg: DictConfig, device: str, copy_rate: float, link: LinkRate | None = None) -> dict[str, Any]:
    """The row of a method that fits; ``link`` replaces the measured rate of its kind of transfer."""
    model = model_of(cfg.model.source, cfg.model.dtype, device)
    config = settings_of(cfg)
    method = _filled(cfg, model, config, device)
    # The replay books memory of its own, which is not the method's.
    plan = method.ledger.plan()
    selection = _replay(cfg, method)
    steps = time_steps(model, method, cfg.warmup, cfg.steps)
    floors = step_floors(model, method, steps, copy_rate, (link := link or link_rate(method)).rate)
    compute_ms = _without_transfers(cfg, model, method) if method.capabilities.offloads else None
    return {
        **_keys(cfg),
        "outcome": "measured",
        "problem": None,
        "rows_per_step": method.rows,
        "graph": steps.graph,
        "attended_tokens": getattr(config, "attended_tokens", None),
        **steps.attended.columns(),
        "remark": method.remark(),
        "selection": selection,
        "host_kv": _sharing(cfg, config, method),
        "capabilities": dataclasses.asdict(method.capabilities),
        **_times(cfg, steps),
        "compute_ms": compute_ms,
        **{name: steps.grown.get(name, 0) for name in ("urgent_bytes", "prefetched_bytes")},
        "hbm_bytes": floors.hbm_bytes,
        "copy_rate": copy_rate,
        "link_rate": link.rate,
        "link_rate_of": link.kind,
        "hbm_floor_ms": floors.hbm_ms,
        "link_floor_ms": floors.link_ms,
        "efficiency": max(floors.hbm_ms, floors.link_ms) / steps.median_ms,
        "gpu": {"weights": model.weight_bytes(), **plan.gpu},
        "host": plan.host,
    }


def settings_of(cfg: DictConfig) -> MethodConfig:
    """The method's options, with ``host_sequences`` for a method that knows it and was not given it."""
    options = OmegaConf.to_container(cfg.method.options, resolve=True)
    known = {field.name for field in dataclasses.fields(method_class(cfg.method.name).config_class)}
    if "host_sequences" in known and cfg.host_sequences:
        options.setdefault("host_sequences", min(cfg.host_sequences, cfg.batch))
    return method_config(cfg.method.name, options)


def _keys(cfg: DictConfig) -> dict[str, Any]:
    setting = method_setting(cfg)
    names = {"model": cfg.model.name, "dtype": cfg.model.dtype, "method": setting["label"]}
    return {**names, "context": cfg.context, "batch": cfg.batch, "budget": setting["options"].get("budget")}


def _decoded(cfg: DictConfig) -> int:
    """Tokens that are decoded in both measurements together."""
    return 2 * (cfg.warmup + cfg.steps + EXTRA_STEPS)


def _filled(cfg: DictConfig, model: Decoder, config: MethodConfig, device: str) -> KVMethod:
    """The method with as many synthetic tokens as leave room for all steps of both measurements."""
    steps = _decoded(cfg)
    chosen, sizes = method_class(cfg.method.name), {"batch": cfg.batch, "context": cfg.context}
    dtype = dtype_from_name(cfg.model.dtype)
    check_memory(chosen.plan(model.config, config, **sizes, dtype=dtype, device_type=device), torch.device(device))
    method = chosen(model.config, config, **sizes, dtype=dtype, device=device)
    most = method.decode_capacity
    require(most is None or steps <= most, "steps", cfg.steps, f"{steps} decoded tokens, and the method takes {most}")
    method.fill_synthetic(cfg.context - steps, cfg.seed)
    return method


def _replay(cfg: DictConfig, method: KVMethod) -> str:
    """Let the seeded process select for a method that selects chunks; says what selects."""
    if not (hasattr(method, "slots") and hasattr(method, "chunks_B")):
        return "its own"
    accuracy = method_setting(cfg).get("replay_accuracy", cfg.accuracy)
    replay_selection(method, ReplayConfig(cfg.reuse, accuracy, cfg.seed))
    return f"synthetic(reuse={cfg.reuse}, accuracy={accuracy}, seed={cfg.seed})"


def _sharing(cfg: DictConfig, config: MethodConfig, method: KVMethod) -> str:
    if not method.capabilities.offloads:
        return "none"
    host_sequences = getattr(config, "host_sequences", 0)
    return f"aliased({host_sequences})" if 0 < host_sequences < cfg.batch else "its own"


def _without_transfers(cfg: DictConfig, model: Decoder, method: KVMethod) -> float:
    """Median ms with the link switched off; the method's state means nothing afterwards."""
    method.transfers = False
    return time_steps(model, method, cfg.warmup, cfg.steps).median_ms


def _times(cfg: DictConfig, steps: Steps) -> dict[str, Any]:
    return {
        "step_ms": steps.step_ms,
        "median_ms": steps.median_ms,
        "tokens_per_s": cfg.batch / steps.median_ms * 1e3,
        "hit_rate": steps.hit_rate,
        "link_bytes": steps.link_bytes,
    }


if __name__ == "__main__":
    main()
