"""``config.json`` to a ``ModelConfig``: every entry that changes a result is read or refused by name.

Entries are checked as they are written; then transformers fills in the defaults of the architecture. It is given the
entries below and no other: a class of labels or of special tokens changes no logit, and ``num_labels`` alone can
fill the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualdecoder.config import ARCHITECTURES, ModelConfig
from dualdecoder.errors import CheckpointError, ConfigError, one_line, require, shortened

CONFIG = "config.json"
# Beside config.json, quantisers describe what they did to the weights, and PEFT what has to be added to them.
FOREIGN_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "adapter_config.json")


@dataclass(frozen=True)
class _Rule:
    holds: Callable[[Any], bool]
    allowed: str
    needed: bool = False
    nullable: bool = False


def _integer(most: int, least: int = 1, **how: bool) -> _Rule:
    def holds(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return _Rule(holds, f"an integer from {least} to {most}", **how)


def _number(most: float) -> _Rule:
    return _Rule(lambda value: isinstance(value, float) and 0 < value <= most, f"a number above 0, at most {most:g}")


SIZE, LAYERS = 2**31 - 1, 4096
_BOOLEAN = _Rule(lambda value: isinstance(value, bool), "true or false")
_OBJECT = _Rule(lambda value: isinstance(value, dict), "an object", nullable=True)
RULES = {
    "vocab_size": _integer(SIZE, needed=True),
    "hidden_size": _integer(SIZE, needed=True),
    "intermediate_size": _integer(SIZE, needed=True),
    "num_hidden_layers": _integer(LAYERS, needed=True),
    "num_attention_heads": _integer(SIZE, needed=True),
    "num_key_value_heads": _integer(SIZE, nullable=True),
    "head_dim": _integer(SIZE, nullable=True),
    "max_position_embeddings": _integer(SIZE),
    "original_max_position_embeddings": _integer(SIZE),
    "sliding_window": _integer(SIZE, nullable=True),
    "max_window_layers": _integer(SIZE, least=0),
    "rms_norm_eps": _number(1.0),
    "rope_theta": _Rule(lambda v: isinstance(v, int | float) and 0 < v <= 1e30, "a number above 0, at most 1e+30"),
    "partial_rotary_factor": _Rule(lambda value: value == 1, "1.0", nullable=True),
    "hidden_act": _Rule(lambda value: value == "silu", "silu"),
    "layer_types": _Rule(lambda value: isinstance(value, list), "a list of layer kinds", nullable=True),
    "tie_word_embeddings": _BOOLEAN,
    "attention_bias": _BOOLEAN,
    "mlp_bias": _BOOLEAN,
    "use_sliding_window": _BOOLEAN,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
}


def read_model_config(folder: Path, name: str) -> ModelConfig:
    """The shape of the checkpoint in ``folder``, called ``name``.

    Raises ``CheckpointError`` if config.json cannot be read or the weights are changed by something that is not,
    ``ConfigError`` naming an entry and what is allowed.
    """
    for file in FOREIGN_FILES:
        if (folder / file).exists():
            raise CheckpointError(f"{folder.name}/{file}: quantised weights and adapters are not read")
    return model_config(read_object(folder / CONFIG), f"{folder.name}/{CONFIG}", name)


def model_config(entries: Mapping[str, Any], where: str, name: str) -> ModelConfig:
    """The shape that the ``entries`` of a config.json describe; errors say that they come from ``where``."""
    try:
        _check(entries)
        return ModelConfig.from_transformers(_standardised(entries), name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; raises ``CheckpointError`` naming the file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} is not readable: {one_line(error)}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path.parent.name}/{path.name} is not readable: it holds no JSON object")
    return entries


def _check(entries: Mapping[str, Any]) -> None:
    kind = entries.get("model_type")
    if kind not in ARCHITECTURES and "auto_map" in entries:
        raise CheckpointError(f"{CONFIG}: model_type={kind!r} needs code of the checkpoint, which is not run")
    require(kind in ARCHITECTURES, "model_type", kind, ", ".join(ARCHITECTURES))
    for name, rule in RULES.items():
        _check_entry(name, rule, entries)
    for name, value in entries.items():
        _reject_foreign(name, value)
    old, new = entries.get("rope_scaling"), entries.get("rope_parameters")
    require(not old or not new or old == new, "rope_scaling", old, f"the same as rope_parameters={new!r}, or only one")


def _check_entry(name: str, rule: _Rule, entries: Mapping[str, Any]) -> None:
    if name not in entries:
        if rule.needed:
            raise ConfigError(f"{name} is missing; allowed: {rule.allowed}")
        return
    value = entries[name]
    if value is not None or not rule.nullable:
        require(rule.holds(value), name, value, rule.allowed)


def _reject_foreign(name: str, value: object) -> None:
    if not value or name in RULES:
        return
    lowered, shown = name.lower(), f"{shortened(repr(name), 80)}: {shortened(repr(value), 80)}"
    # quantization_config, compression_config, MLX's "quantization": the stored numbers are not the weights.
    if "quant" in lowered or "compress" in lowered:
        raise ConfigError(f"{shown}: quantised weights are not read")
    if "rope" in lowered or "rotary" in lowered:
        raise ConfigError(f"{shown} is not known; allowed: rope_parameters, rope_scaling, rope_theta")
    require(name != "transformers_weights", name, value, "weights in model.safetensors, or beside its index")


def _standardised(entries: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    chosen = {name: value for name, value in entries.items() if name in RULES}
    try:
        config = AutoConfig.for_model(entries["model_type"], **json.loads(json.dumps(chosen)))
        # As its models do before they rotate: only now it knows an original length beside the rope entries.
        config.standardize_rope_params()
        return config
    # Its checks raise exceptions of many kinds, none of them a UserError.
    except Exception as error:
        raise ConfigError(f"not a {entries['model_type']} config: {one_line(error)}") from error
