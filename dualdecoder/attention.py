"""Attention of one decode step's rows over gathered keys and values.

Suffixes: B sequences, R rows, H query heads, K KV heads, G = H / K, M = R * G query rows of a KV head, D head size,
P past tokens, X = K and V.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def step_attention(q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, past_BKXPD: Tensor, allowed_BKP: Tensor) -> Tensor:
    """Attend to the allowed past tokens and, causally, to the rows of the step itself; ``[B, R, H, D]``.

    Past tokens that are not allowed must be finite: they are weighted with zero.
    """
    rows, kv_heads = k_BRKD.shape[1:3]
    own_BKXRD = torch.stack((k_BRKD, v_BRKD), dim=1).permute(0, 3, 1, 2, 4)
    k_BKTD, v_BKTD = torch.cat((past_BKXPD, own_BKXRD), dim=3).unbind(dim=2)
    q_BKMD = q_BRHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    mask = _mask(allowed_BKP, rows, kv_heads, q_BKMD.shape[2] // rows)
    o_BKMD = F.scaled_dot_product_attention(q_BKMD, k_BKTD, v_BKTD, attn_mask=mask)
    return o_BKMD.unflatten(2, (rows, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)


def _mask(allowed_BKP: Tensor, rows: int, kv_heads: int, group: int) -> Tensor:
    batch, _, past = allowed_BKP.shape
    allowed_BKRP = allowed_BKP.unsqueeze(2).expand(batch, kv_heads, rows, past)
    own_RR = torch.ones(rows, rows, dtype=torch.bool, device=allowed_BKP.device).tril()
    own_BKRR = own_RR.expand(batch, kv_heads, rows, rows)
    return torch.cat((allowed_BKRP, own_BKRR), dim=3).repeat_interleave(group, dim=2)
