"""Dense, exact prefill, the same for every method: layer-major, MLP in token pieces.

One layer's tensors go to a sink as soon as they exist. A ``PrefillSnapshot`` is a sink that keeps them, so that
one prefill can be replayed into many methods.
Suffixes: T prompt tokens, H query heads, K KV heads, D head size, E model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dualdecoder.finite import finite_rows, require_finite
from dualdecoder.method import KVMethod, PrefillSink
from dualdecoder.model import Decoder, Projections

# Bounds the MLP's transient memory; large enough that the matrix products stay efficient.
MLP_PIECE_TOKENS = 4096


@torch.inference_mode()
def prefill(model: Decoder, token_ids: Sequence[int], sink: PrefillSink) -> Tensor:
    """Run the prompt and hand each layer to ``sink``; returns hidden states ``[T, E]`` before the final norm."""
    tokens_1T = torch.tensor([list(token_ids)], device=model.device)
    rotation = model.rotation(torch.arange(tokens_1T.shape[1], device=model.device)[None])
    x_1TE = model.embed(tokens_1T)
    for layer in range(model.config.layers):
        p = model.project(layer, x_1TE, rotation, keeps_pre_rope=True)
        sink(layer, *(tensor[0] for tensor in p))
        x_1TE = _finish_in_pieces(model, layer, x_1TE, causal_attention(p))
    return x_1TE[0]


def causal_attention(p: Projections) -> Tensor:
    """Dense causal attention of a prompt over itself, ``[1, T, H, D]``."""
    q, k, v = (t.transpose(1, 2) for t in (p.q_BRHD, p.k_BRKD, p.v_BRKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _finish_in_pieces(model: Decoder, layer: int, x_1TE: Tensor, o_1THD: Tensor) -> Tensor:
    pieces = zip(x_1TE.split(MLP_PIECE_TOKENS, 1), o_1THD.split(MLP_PIECE_TOKENS, 1), strict=True)
    return torch.cat([model.finish_layer(layer, x, o) for x, o in pieces], dim=1)


@dataclass
class PrefillSnapshot:
    """What one prefill produced: logits ``[V]`` and per layer q, k before rotation, k, v (each ``[T, heads, D]``)."""

    token_ids: list[int]
    logits_V: Tensor
    layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def take(cls, model: Decoder, token_ids: Sequence[int]) -> PrefillSnapshot:
        """Prefill once and keep everything. Raises ``NotFiniteError`` if the logits are not finite."""
        layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        hidden_TE = prefill(model, token_ids, lambda _, *tensors: layers.append(tensors))
        logits_V = last_logits(model, hidden_TE)
        require_finite(finite_rows(logits_V[None]).tolist(), model.dtype)
        return cls(list(token_ids), logits_V, layers)

    def replay(self, method: KVMethod, sequence: int) -> Tensor:
        """Hand all layers to ``method`` as its sequence number ``sequence``; returns the logits ``[V]``."""
        for layer, tensors in enumerate(self.layers):
            method.prefill_layer(sequence, layer, *tensors)
        return self.logits_V


@torch.inference_mode()
def last_logits(model: Decoder, hidden_TE: Tensor) -> Tensor:
    """Logits ``[V]`` after the last prompt token."""
    return model.logits(hidden_TE[None, -1:])[0, 0]


def prefill_into(
    model: Decoder,
    method: KVMethod,
    sequence: int,
    token_ids: Sequence[int],
    after_layer: Callable[[], None] = lambda: None,
) -> Tensor:
    """Prefill straight into a method, keeping no snapshot; returns the logits ``[V]``.

    ``after_layer`` is called when the method has taken a layer; on a GPU its kernels may still run then.
    """

    def sink(layer: int, *tensors: Tensor) -> None:
        method.prefill_layer(sequence, layer, *tensors)
        after_layer()

    return last_logits(model, prefill(model, token_ids, sink))
