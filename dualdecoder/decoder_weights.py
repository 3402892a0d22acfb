"""Which tensors a decoder is made of, under transformers' names, and the decoder from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.errors import CheckpointError
from dualdecoder.model import Decoder, LayerWeights

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Rotary buffers of old checkpoints follow from the config.
HARMLESS = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
Read = Callable[[str], Tensor]


def tensor_shapes(config: ModelConfig, with_head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the decoder reads; ``with_head``: an unembedding of its own."""
    table = (config.vocabulary, config.width)
    yield EMBEDDING, table
    for layer in range(config.layers):
        yield from _layer_shapes(config, _prefix(layer))
    yield FINAL_NORM, (config.width,)
    if with_head:
        yield HEAD, table


def require_tensors(
    where: str, needed: Iterable[tuple[str, tuple[int, ...]]], stored: Iterable[str], shape: Callable[[str], tuple]
) -> None:
    """Raise ``CheckpointError`` unless ``stored`` are the ``needed`` tensors and none beside them.

    A tensor nobody reads is a scale, a bias or an adapter: without it the others are not what they were trained to be.
    """
    left = set(stored)
    for name, expected in needed:
        if name not in left:
            raise CheckpointError(f"{where}: weight {name!r} is missing")
        left.remove(name)
        if shape(name) != expected:
            raise CheckpointError(f"{where}: weight {name!r} has shape {shape(name)}, needs {expected} by the config")
    for name in sorted(left):
        if not HARMLESS.fullmatch(name):
            raise CheckpointError(f"{where}: weight {name!r} is not one that this architecture reads")


def make_decoder(config: ModelConfig, read: Read, dtype: torch.dtype, device: str) -> Decoder:
    """The decoder of ``config`` in ``dtype`` on ``device``, its tensors from ``read``."""

    def moved(name: str) -> Tensor:
        return read(name).to(device=device, dtype=dtype)

    embedding_VE = moved(EMBEDDING)
    return Decoder(
        config=config,
        embedding_VE=embedding_VE,
        layers=[_layer(config, _prefix(layer), moved) for layer in range(config.layers)],
        final_norm_E=moved(FINAL_NORM),
        unembedding_VE=embedding_VE if config.tied_embeddings else moved(HEAD),
    )


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _layer_shapes(c: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    for letter, heads in (("q", c.query_heads), ("k", c.kv_heads), ("v", c.kv_heads)):
        yield f"{attention}{letter}_proj.weight", (heads * c.head_dim, c.width)
        if c.qkv_bias:
            yield f"{attention}{letter}_proj.bias", (heads * c.head_dim,)
        if c.qk_norm and letter != "v":
            yield f"{attention}{letter}_norm.weight", (c.head_dim,)
    yield f"{attention}o_proj.weight", (c.width, c.query_heads * c.head_dim)
    yield f"{mlp}gate_proj.weight", (c.mlp_width, c.width)
    yield f"{mlp}up_proj.weight", (c.mlp_width, c.width)
    yield f"{mlp}down_proj.weight", (c.width, c.mlp_width)
    yield f"{prefix}input_layernorm.weight", (c.width,)
    yield f"{prefix}post_attention_layernorm.weight", (c.width,)


def _layer(c: ModelConfig, prefix: str, read: Read) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def qkv(kind: str) -> Tensor:
        return torch.cat([read(f"{attention}{letter}_proj.{kind}") for letter in "qkv"])

    return LayerWeights(
        attention_norm_E=read(f"{prefix}input_layernorm.weight"),
        qkv_QE=qkv("weight"),
        output_EA=read(f"{attention}o_proj.weight"),
        mlp_norm_E=read(f"{prefix}post_attention_layernorm.weight"),
        gate_up_2FE=torch.cat([read(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]),
        down_EF=read(f"{mlp}down_proj.weight"),
        qkv_bias_Q=qkv("bias") if c.qkv_bias else None,
        q_norm_D=read(f"{attention}q_norm.weight") if c.qk_norm else None,
        k_norm_D=read(f"{attention}k_norm.weight") if c.qk_norm else None,
    )
