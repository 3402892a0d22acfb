"""GGUF metadata to the entries of a config.json: every key of the architecture is read, neutral, or refused by name."""

from __future__ import annotations

from typing import Any

from dualdecoder.errors import CheckpointError, ConfigError, require, shortened

# Those of llama.cpp; files of Mistral say llama.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Keys that change nothing at the value given here; None: at any value.
_NEUTRAL = {
    "tensor_data_layout": (None,),
    "rope.scaling.finetuned": (None,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def config_entries(
    fields: dict[str, Any], where: str, vocabulary: int, tied: bool, rope_factors: list[float] | None
) -> dict[str, Any]:
    """Entries of the config.json that GGUF metadata ``fields`` amount to.

    where: the file, for errors. vocabulary: rows of the embedding table. tied: whether there is no other table.
    rope_factors: what each rotary frequency is divided by, if the file holds that tensor.
    Raises ``ConfigError`` for a key of the architecture that is neither read nor neutral.
    """
    architecture = fields.get("general.architecture")
    require(architecture in ARCHITECTURES, f"{where}: general.architecture", architecture, ", ".join(ARCHITECTURES))
    kind = fields.get("general.type", "model")
    require(kind == "model", f"{where}: general.type", kind, "model")
    keys = _Keys(fields, f"{architecture}.", where)
    entries = {name: keys.needed(key) for key, name in _SIZES.items()}
    entries["num_key_value_heads"] = keys.take("attention.head_count_kv", entries["num_attention_heads"])
    entries["head_dim"] = _head_dim(keys, entries)
    entries["rope_parameters"] = _rope(keys, entries["max_position_embeddings"], rope_factors)
    entries |= _window(keys)
    stated = keys.take("vocab_size", vocabulary)
    require(stated == vocabulary, f"{where}: vocab_size", stated, f"{vocabulary}, the rows of token_embd.weight")
    keys.require_rest_neutral()
    model_type = "mistral" if architecture == "llama" and "sliding_window" in entries else architecture
    return entries | {
        "model_type": model_type,
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }


class _Keys:
    """Metadata below one prefix, each key taken at most once, so that what is left over is known."""

    def __init__(self, fields: dict[str, Any], prefix: str, where: str) -> None:
        self.where, self.prefix = where, prefix
        self._left = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}

    def take(self, key: str, default: Any = None) -> Any:
        return self._left.pop(key, default)

    def needed(self, key: str) -> Any:
        if key not in self._left:
            raise CheckpointError(f"{self.where}: metadata {self.prefix}{key} is missing")
        return self.take(key)

    def require(self, holds: bool, key: str, value: object, allowed: str) -> None:
        require(holds, f"{self.where}: {self.prefix}{key}", value, allowed)

    def require_rest_neutral(self) -> None:
        for key, value in self._left.items():
            neutral = _NEUTRAL.get(key)
            if neutral is None:
                raise ConfigError(
                    f"{self.where}: metadata {shortened(repr(self.prefix + key))} is not one that we read"
                )
            allowed = " or ".join(str(good) for good in neutral)
            self.require(neutral == (None,) or value in neutral, key, value, allowed)


def _head_dim(keys: _Keys, entries: dict[str, Any]) -> int:
    width, heads = entries["hidden_size"], entries["num_attention_heads"]
    good = isinstance(heads, int) and heads >= 1 and isinstance(width, int)
    keys.require(good, "attention.head_count", heads, "a positive integer")
    size = keys.take("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        value = keys.take(key, size)
        keys.require(value == size, key, value, f"{size}, the size of a head's key")
    scale = keys.take("attention.scale", 0.0)
    usual = isinstance(size, int) and size >= 1 and abs(scale - size**-0.5) < 1e-6
    keys.require(scale == 0 or usual, "attention.scale", scale, "1 / sqrt(head size)")
    return size


def _window(keys: _Keys) -> dict[str, Any]:
    window = keys.take("attention.sliding_window", 0)
    # In every layer: which of them slide, the file does not say.
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0} if window else {}


def _rope(keys: _Keys, context: int, pair_factors: list[float] | None) -> dict[str, Any]:
    """``rope_parameters`` of transformers for what llama.cpp does with the same keys."""
    base = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base", 10_000.0)}
    linear = keys.take("rope.scale_linear", 0.0)
    factor = keys.take("rope.scaling.factor", 0.0) or linear or 1.0
    kind = keys.take("rope.scaling.type", "linear")
    original = keys.take("rope.scaling.original_context_length", 0) or context
    betas = {name: keys.take(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    keys.require(kind in ("none", "linear", "yarn"), "rope.scaling.type", kind, "none, linear, yarn")
    scaled = kind != "none" and factor != 1.0
    if pair_factors is not None:
        keys.require(not scaled, "rope.scaling.factor", factor, "1 beside rope_freqs.weight")
        # Llama 3.1's rule, worked out by the converter: longrope with one list says the same of every position.
        lists = {"short_factor": pair_factors, "long_factor": pair_factors, "attention_factor": 1.0, "factor": 1.0}
        return base | lists | {"rope_type": "longrope", "original_max_position_embeddings": context}
    if not scaled:
        return base
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return base | yarn | {name: value for name, value in betas.items() if value is not None}
