"""A minimal Llama-family decoder: weights and the four pieces of a layer that do not touch the KV cache.

The cache belongs to a ``KVMethod``; ``step.py`` and ``prefill.py`` put the pieces and the method together.
Suffixes: B sequences, R rows (prompt tokens in prefill), H query heads, K KV heads, D head size, E model width,
F MLP width, V vocabulary, Q = (H + 2 K) D fused projections.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.rope import inverse_frequencies, rotate


@dataclass
class LayerWeights:
    """Weights of one layer, projections fused along the output dimension."""

    attention_norm_E: Tensor
    qkv_QE: Tensor
    output_EA: Tensor  # A = H * D
    mlp_norm_E: Tensor
    gate_up_2FE: Tensor
    down_EF: Tensor
    qkv_bias_Q: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None


class Projections(NamedTuple):
    """What one layer's attention input becomes. ``k_pre_rope`` is the key before rotation, where it was asked for."""

    q_BRHD: Tensor
    k_pre_rope_BRKD: Tensor
    k_BRKD: Tensor
    v_BRKD: Tensor


@dataclass
class Decoder:
    """Weights plus the arithmetic between two attentions. All tensors share one dtype and device."""

    config: ModelConfig
    embedding_VE: Tensor
    layers: list[LayerWeights]
    final_norm_E: Tensor
    unembedding_VE: Tensor

    def __post_init__(self) -> None:
        inverse_P, self.rope_scale = inverse_frequencies(self.config.rope, self.config.head_dim)
        self.inverse_frequency_P = inverse_P.to(self.device)

    @property
    def device(self) -> torch.device:
        return self.embedding_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VE.dtype

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Decoder:
        """The same weights on another device or in another dtype; tied embeddings stay tied."""
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else moved.setdefault(id(tensor), tensor.to(device, dtype))

        layers = [LayerWeights(**{name: move(weight) for name, weight in vars(w).items()}) for w in self.layers]
        ends = [move(t) for t in (self.embedding_VE, self.final_norm_E, self.unembedding_VE)]
        return Decoder(self.config, ends[0], layers, ends[1], ends[2])

    def embed(self, tokens_BR: Tensor) -> Tensor:
        """Token ids to hidden states ``[B, R, E]``."""
        return F.embedding(tokens_BR, self.embedding_VE)

    def rotation(self, positions_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, R, D/2]`` for the positions, shared by all layers of a step."""
        angle_BRP = positions_BR.unsqueeze(-1).float() * self.inverse_frequency_P
        return (angle_BRP.cos() * self.rope_scale).to(self.dtype), (angle_BRP.sin() * self.rope_scale).to(self.dtype)

    def project(
        self, layer: int, x_BRE: Tensor, rotation: tuple[Tensor, Tensor], keeps_pre_rope: bool = False
    ) -> Projections:
        """Norm, fused QKV projection, optional QK norm, rotation.

        Without ``keeps_pre_rope`` the key before its rotation may be overwritten by the rotated one.
        """
        c, w = self.config, self.layers[layer]
        if _is_gpu_step(x_BRE) and not keeps_pre_rope:
            from dualdecoder.kernels import layer as fused

            q_BRHD, k_BRKD, v_BRKD = fused.project(c, w, x_BRE, rotation)
            return Projections(q_BRHD, k_BRKD, k_BRKD, v_BRKD)
        normed_BRE = self._norm(x_BRE, w.attention_norm_E)
        qkv_BRQ = F.linear(normed_BRE, w.qkv_QE, w.qkv_bias_Q)
        heads = qkv_BRQ.unflatten(-1, (c.query_heads + 2 * c.kv_heads, c.head_dim))
        q_BRHD, k_BRKD, v_BRKD = heads.split((c.query_heads, c.kv_heads, c.kv_heads), dim=2)
        if w.q_norm_D is not None:
            q_BRHD, k_BRKD = self._norm(q_BRHD, w.q_norm_D), self._norm(k_BRKD, w.k_norm_D)
        return Projections(rotate(q_BRHD, *rotation), k_BRKD, rotate(k_BRKD, *rotation), v_BRKD)

    def query(self, layer: int, x_BRE: Tensor, rotation: tuple[Tensor, Tensor], normed_by: int) -> Tensor:
        """Rotated queries ``[B, R, H, D]`` that ``layer`` would make of ``x_BRE`` behind the norm of ``normed_by``."""
        c, w = self.config, self.layers[layer]
        rows = c.query_heads * c.head_dim
        bias = None if w.qkv_bias_Q is None else w.qkv_bias_Q[:rows]
        q_BRQ = F.linear(self._norm(x_BRE, self.layers[normed_by].attention_norm_E), w.qkv_QE[:rows], bias)
        q_BRHD = q_BRQ.unflatten(-1, (c.query_heads, c.head_dim))
        return rotate(q_BRHD if w.q_norm_D is None else self._norm(q_BRHD, w.q_norm_D), *rotation)

    def finish_layer(self, layer: int, x_BRE: Tensor, o_BRHD: Tensor) -> Tensor:
        """Output projection and MLP, each added to the residual stream; ``x_BRE`` may be overwritten."""
        w = self.layers[layer]
        if _is_gpu_step(x_BRE):
            from dualdecoder.kernels import layer as fused

            return fused.finish_layer(self.config, w, x_BRE, o_BRHD)
        x_BRE = x_BRE + F.linear(o_BRHD.flatten(2), w.output_EA)
        gate, up = F.linear(self._norm(x_BRE, w.mlp_norm_E), w.gate_up_2FE).chunk(2, dim=-1)
        return x_BRE + F.linear(F.silu(gate) * up, w.down_EF)

    def logits(self, x_BRE: Tensor) -> Tensor:
        """Next-token logits ``[B, R, V]`` in fp32."""
        return F.linear(self._norm(x_BRE, self.final_norm_E), self.unembedding_VE).float()

    def weight_bytes(self) -> int:
        """Bytes of all weights; tied embeddings count once."""
        tensors = [self.embedding_VE, self.final_norm_E, self.unembedding_VE]
        for layer in self.layers:
            tensors += [t for t in vars(layer).values() if t is not None]
        return sum({id(t): t.nbytes for t in tensors}.values())

    def step_weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all but the embedding table, of which it reads a few rows."""
        tied = self.unembedding_VE is self.embedding_VE
        return self.weight_bytes() - (0 if tied else self.embedding_VE.nbytes)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _is_gpu_step(x_BRE: Tensor) -> bool:
    """Whether these are the one or two rows of a decode step on a GPU, for which there are fused kernels."""
    return x_BRE.is_cuda and x_BRE.shape[1] <= 2


def layer_shapes(c: ModelConfig) -> dict[str, tuple[int, ...] | None]:
    """Shape of each ``LayerWeights`` field; None where the architecture has no such weight."""
    projections = (c.query_heads + 2 * c.kv_heads) * c.head_dim
    return {
        "attention_norm_E": (c.width,),
        "qkv_QE": (projections, c.width),
        "output_EA": (c.width, c.query_heads * c.head_dim),
        "mlp_norm_E": (c.width,),
        "gate_up_2FE": (2 * c.mlp_width, c.width),
        "down_EF": (c.width, c.mlp_width),
        "qkv_bias_Q": (projections,) if c.qkv_bias else None,
        "q_norm_D": (c.head_dim,) if c.qk_norm else None,
        "k_norm_D": (c.head_dim,) if c.qk_norm else None,
    }


def random_decoder(
    config: ModelConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> Decoder:
    """A decoder of the given shape with seeded normal weights (std 0.02, norms 1). On ``meta`` it only has sizes."""
    generator = None if torch.device(device).type == "meta" else torch.Generator(device).manual_seed(seed)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device=device)
        if generator is None:
            # Sizes need no values, and torch's own normal_ for meta tensors keeps every caller's locals alive.
            return empty
        return empty.fill_(1) if "norm" in name else empty.normal_(0, 0.02, generator=generator)

    def layer() -> LayerWeights:
        return LayerWeights(**{k: weight(k, s) if s else None for k, s in layer_shapes(config).items()})

    table = (config.vocabulary, config.width)
    embedding_VE = weight("embedding", table)
    unembedding_VE = embedding_VE if config.tied_embeddings else weight("unembedding", table)
    layers = [layer() for _ in range(config.layers)]
    return Decoder(config, embedding_VE, layers, weight("norm", (config.width,)), unembedding_VE)


@cache
def planned_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights of this shape take, counted without making a tensor of them."""
    layer = sum(math.prod(shape) for shape in layer_shapes(config).values() if shape)
    tables = (1 if config.tied_embeddings else 2) * config.vocabulary * config.width
    return (config.layers * layer + tables + config.width) * dtype.itemsize
