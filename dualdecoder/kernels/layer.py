"""The arithmetic between two attentions of a decode step with fused kernels; the same as ``model.Decoder``'s.

For steps of one or two rows on a GPU, where launches and not bytes are what small operations cost.
Suffixes: as in ``dualdecoder/model.py``; N = B R flattened rows.
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
    """Output projection and MLP, each added to the residual stream; ``x_BRE`` is overwritten."""
    added_BRE = F.linear(o_BRHD.flatten(2), w.output_EA)
    normed_BRE = _normed(x_BRE, w.mlp_norm_E, c.norm_eps, added_BRE)
    gate_up_N2F = F.linear(normed_BRE, w.gate_up_2FE).flatten(0, 1)
    activated_NF = swiglu(gate_up_N2F, gate_up_N2F.new_empty(len(gate_up_N2F), c.mlp_width))
    return torch.addmm(x_BRE.flatten(0, 1), activated_NF, w.down_EF.t()).view_as(x_BRE)


def _normed(x_BRE: Tensor, weight_E: Tensor, eps: float, added_BRE: Tensor | None = None) -> Tensor:
    added_NE = None if added_BRE is None else added_BRE.flatten(0, 1)
    normed_BRE = torch.empty_like(x_BRE)
    rms_norm(x_BRE.view(-1, x_BRE.shape[-1]), weight_E, eps, normed_BRE.view(-1, x_BRE.shape[-1]), added_NE)
    return normed_BRE
