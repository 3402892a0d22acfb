"""The arithmetic between two attentions of a decode step with fused kernels; the same as ``model.Decoder``'s.

For steps of one or two rows on a GPU, where launches and not bytes are what small operations cost. The products are
cuBLAS's: it reads the large matrices faster than a Triton kernel with the norm, SwiGLU or residual fused into it did.
Suffixes: as in ``dualdecoder/model.py``; I inputs of a product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dualdecoder.kernels.elementwise import rms_norm, rotate_queries_and_keys, swiglu

if TYPE_CHECKING:
    from dualdecoder.config import ModelConfig
    from dualdecoder.model import LayerWeights


def project(
    c: ModelConfig, w: LayerWeights, x_BRE: Tensor, rotation: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, fused QKV projection, optional QK norm, rotation: q ``[B, R, H, D]``, k and v ``[B, R, K, D]``."""
    qkv_BRQ = F.linear(_normed(x_BRE, w.attention_norm_E, c.norm_eps), w.qkv_QE, w.qkv_bias_Q)
    norms = None if w.q_norm_D is None else (w.q_norm_D, w.k_norm_D)
    rotate_queries_and_keys(qkv_BRQ, rotation, c.query_heads, c.kv_heads, norms, c.norm_eps)
    heads = qkv_BRQ.unflatten(-1, (c.query_heads + 2 * c.kv_heads, c.head_dim))
    q_BRHD, k_BRKD, v_BRKD = heads.split((c.query_heads, c.kv_heads, c.kv_heads), dim=2)
    return q_BRHD, k_BRKD, v_BRKD


def finish_layer(c: ModelConfig, w: LayerWeights, x_BRE: Tensor, o_BRHD: Tensor) -> Tensor:
    """Output projection and MLP, each added to the residual stream ``x_BRE`` in place; returns ``x_BRE``."""
    _add_product(x_BRE, o_BRHD.flatten(2), w.output_EA)
    gate_up_BR2F = F.linear(_normed(x_BRE, w.mlp_norm_E, c.norm_eps), w.gate_up_2FE)
    _add_product(x_BRE, swiglu(gate_up_BR2F, x_BRE.new_empty(*x_BRE.shape[:2], c.mlp_width)), w.down_EF)
    return x_BRE


def _add_product(x_BRE: Tensor, input_BRI: Tensor, weight_EI: Tensor) -> None:
    """``x += input @ weight^T`` in place: one launch, and no copy of x."""
    x_BRE.view(-1, x_BRE.shape[-1]).addmm_(input_BRI.flatten(0, 1), weight_EI.t())


def _normed(x_BRE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return rms_norm(x_BRE, weight_E, eps, torch.empty_like(x_BRE))
