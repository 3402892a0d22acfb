"""Small random checkpoints of every family in every form of storage, and transformers' logits for them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dualdecoder.checkpoints import load_model
from dualdecoder.prefill import prefill

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Attention far from uniform, so that a mistake in it shows.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
}
TOKENS = torch.randint(96, (200,), generator=torch.Generator().manual_seed(7)).tolist()
TOLERANCE = 1e-3
BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
END_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def small_model(family: str = "llama", seed: int = 0, **changes: Any) -> nn.Module:
    """A seeded transformers model whose norms and biases are not the neutral ones."""
    torch.manual_seed(seed)
    own = {"head_dim": 32} if family == "qwen3" else {"sliding_window": None} if family == "mistral" else {}
    config = FAMILIES[family](**copy.deepcopy(SMALL | own | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


@torch.inference_mode()
def reference_logits(model: nn.Module) -> Tensor:
    """transformers' logits ``[T, V]`` of ``TOKENS``."""
    return model(torch.tensor([TOKENS])).logits[0].float()


def loaded_reference(folder: Path) -> Tensor:
    """The same of a folder that transformers loads itself."""
    return reference_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def our_logits(source: Path) -> Tensor:
    """What this package makes of ``source``: logits ``[T, V]`` of as many of ``TOKENS`` as its context takes."""
    model = load_model(str(source))
    return model.logits(prefill(model, TOKENS[: model.config.max_context], lambda *_: None)[None])[0]


def assert_same(source: Path, expected: Tensor) -> None:
    """Raise unless our logits are the ``expected``, as far as the context goes."""
    ours = our_logits(source)
    difference = (ours - expected[: len(ours)]).abs().max()
    assert difference < TOLERANCE, f"{float(difference):.3g} of {float(expected.abs().max()):.3g}"


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; ``...`` takes an entry away."""
    path = folder / "config.json"
    entries = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in entries.items() if value is not ...}))


def gguf_metadata(model: nn.Module) -> dict[str, Any]:
    """Metadata below the architecture's prefix, as llama.cpp's converter writes it."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    } | _rope_scaling(config.rope_parameters)


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] not in ("linear", "yarn"):
        return {}
    scaling: dict[str, Any] = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if "original_max_position_embeddings" in rope:
        scaling["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return scaling


def gguf_tensors(model: nn.Module, architecture: str) -> dict[str, np.ndarray]:
    """All tensors under GGUF's names and in its layout, and Llama 3.1's frequency factors where they are used."""
    config, tensors = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = weight.numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = value.reshape(-1, 2, _head_dim(config) // 2, value.shape[1])
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        tensors[gguf_name(name)] = value
    if config.rope_parameters["rope_type"] == "llama3":
        base = config.rope_parameters["rope_theta"] ** (-torch.arange(0, _head_dim(config), 2) / _head_dim(config))
        tensors["rope_freqs.weight"] = (base / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    return tensors


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def gguf_name(name: str) -> str:
    if name in END_NAMES:
        return END_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{BLOCK_NAMES[part]}.{kind}"


def architecture_of(model: nn.Module) -> str:
    """llama.cpp's name of the family: Mistral is a llama there."""
    return "llama" if model.config.model_type == "mistral" else model.config.model_type


def write_gguf(
    path: Path,
    model: nn.Module,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    own_keys: dict[str, Any] | None = None,
    **how: Any,
) -> None:
    """Write ``model``; ``keys`` (below the architecture), ``own_keys`` and ``tensors`` replace, or with None drop."""
    architecture = architecture_of(model)
    writer = GGUFWriter(path, architecture, **how)
    below = {f"{architecture}.{key}": value for key, value in (gguf_metadata(model) | (keys or {})).items()}
    for key, value in (below | (own_keys or {})).items():
        _add_key(writer, key, value)
    for name, value in (gguf_tensors(model, architecture) | (tensors or {})).items():
        if value is not None:
            _add_tensor(writer, name, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, value: Any, kind: GGMLQuantizationType) -> None:
    if isinstance(value, tuple):  # raw bytes, and the type that they are of
        writer.add_tensor(name, value[0], raw_dtype=value[1])
    elif value.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, np.ascontiguousarray(value))
    else:
        raw = quantize(np.ascontiguousarray(value), kind)
        writer.add_tensor(name, raw, raw_dtype=None if kind == GGMLQuantizationType.F16 else kind)


def rounded(model: nn.Module, kind: GGMLQuantizationType) -> nn.Module:
    """The model with the weights that a GGUF of ``kind`` keeps of it. Rows are quantised alone, in any order."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            value = parameter.detach().numpy()
            parameter.data = torch.from_numpy(dequantize(quantize(value, kind), kind).copy())
    return model
