"""Second launch of an H2O step: the output, the accumulated probabilities, the eviction and the new token.

Follows ``ring_attention.attend_splits`` with kept logits; its reference are ``_attend`` and ``_account`` of
``baselines.h2o.H2O``. One program a sequence and KV head: it joins the splits, turns the logits into this step's
probabilities, adds them to the scores, finds the token to evict, and writes the row's key, value, position and score in
its place.
Bytes: the logits (4 G a place), scores (8) and positions (8): a tenth of what attention reads at D 128 in 16 bits.
Suffixes: B sequences, R = 1 row, H query heads, K KV heads, G = H / K, D head size, P places, Z splits, X = K and V.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baselines.kernels.ring_attention import RingWorkspace, append, merge_sizes, merged, own_strides
from dualdecoder.errors import require
from dualdecoder.kernels.online_softmax import LOG2_E

# Places that one program holds in registers.
MAX_PLACES = 16384
PLACES_A_WARP = 512


class Kept(NamedTuple):
    """What a layer keeps. Places ``0 .. filled_B - 1`` hold a token, in any order; empty ones are not read.

    kv_BKXPD; score_BKP (fp32): probability received so far, summed over queries and the group; position_BKP (int64).
    """

    kv_BKXPD: Tensor
    score_BKP: Tensor
    position_BKP: Tensor


class Step(NamedTuple):
    """This step's lengths (int64): of the context and of its filled places; commit_B (bool): whose row is kept."""

    length_B: Tensor
    filled_B: Tensor
    commit_B: Tensor


@triton.jit
def _place_of_least(score_P, position_P, candidate_P, last, PP: tl.constexpr):
    """Place of the least score among the candidates; of equal ones, of the lowest position (all below ``last``)."""
    least = tl.min(tl.where(candidate_P, score_P, float("inf")), axis=0)
    oldest = tl.min(tl.where(candidate_P & (score_P == least), position_P, last), axis=0)
    p_P = tl.arange(0, PP)
    return tl.sum(tl.where(candidate_P & (position_P == oldest), p_P, 0), axis=0)


@triton.jit
def _account_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, peak_ptr, total_ptr, logits_ptr, o_ptr, kv_ptr, score_ptr, position_ptr,
    length_ptr, filled_ptr, commit_ptr, scale, recent,
    q_stride_b, q_stride_h, k_stride_b, k_stride_k, v_stride_b, v_stride_k,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, ZP: tl.constexpr,
    ZZ: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, kv_head = head // K, head % K
    k_ptr += b * k_stride_b + kv_head * k_stride_k
    v_ptr += b * v_stride_b + kv_head * v_stride_k
    o_GD, logsumexp_G, own_G = merged(
        q_ptr + b * q_stride_b + kv_head * G * q_stride_h, k_ptr, v_ptr, partial_ptr + head * (Z * G * D),
        peak_ptr + head * (Z * G), total_ptr + head * (Z * G), scale, q_stride_h, G, GP, D, Z, ZP, ZZ,
    )  # fmt: skip
    g, d, p = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, PP)
    o_GD = o_GD.to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (head * G + g)[:, None] * D + d[None, :], o_GD, mask=(g < G)[:, None])
    score_ptr += head * P
    position_ptr += head * P
    kv_ptr += head * (2 * P * D)
    committed = tl.load(commit_ptr + b)
    if committed:
        length, filled = tl.load(length_ptr + b), tl.load(filled_ptr + b).to(tl.int32)
        filled_P = p < filled
        score_P = tl.load(score_ptr + p, mask=filled_P, other=0.0)
        position_P = tl.load(position_ptr + p, mask=filled_P, other=0)
        for i in tl.static_range(G):
            logsumexp = tl.sum(tl.where(g == i, logsumexp_G, 0.0), axis=0)
            logit_P = tl.load(logits_ptr + (head * G + i) * P + p, mask=filled_P, other=float("-inf"))
            score_P += tl.exp2(logit_P - logsumexp)
        tl.store(score_ptr + p, score_P, mask=filled_P)
        place = _place_of_least(score_P, position_P, filled_P & (position_P <= length - recent), length, PP)
        place = tl.where(filled < P, filled, place)
        # The old score of this place has been written by another thread.
        tl.debug_barrier()
        tl.store(score_ptr + place, tl.sum(tl.where(g < G, tl.exp2(own_G - logsumexp_G), 0.0), axis=0))
        tl.store(position_ptr + place, length)
        append(kv_ptr + place * D, kv_ptr + (P + place) * D, k_ptr, v_ptr, committed, D)


def merge_and_account(
    q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, kept: Kept, step: Step, recent: int, workspace: RingWorkspace,
    o_BRHD: Tensor,
) -> Tensor:  # fmt: skip
    """Fill and return ``o_BRHD``; where committed, add this step's probabilities and take in the row's token.

    Once all places are filled it replaces the token with the least score among those at least ``recent`` positions
    behind the row; of equal scores the oldest. Tensors of ``kept`` and ``o_BRHD`` are contiguous, q, k, v in the last
    dimension. Raises ``ConfigError`` for more than ``MAX_PLACES`` places or a workspace without logits.
    """
    batch, kv_heads, _, places, head_dim = kept.kv_BKXPD.shape
    require(places <= MAX_PLACES, "heavy + recent", places, f"at most {MAX_PLACES} tokens on a GPU")
    require(workspace.logits_BHP is not None, "workspace", "without logits", "one with keep_logits")
    padded = triton.next_power_of_2(places)
    _account_kernel[(batch * kv_heads,)](
        q_BRHD, k_BRKD, v_BRKD, workspace.partial_BKZGD, workspace.peak_BKZG, workspace.total_BKZG,
        workspace.logits_BHP, o_BRHD, *kept, *step, head_dim**-0.5 * LOG2_E, recent,
        *own_strides(q_BRHD, k_BRKD, v_BRKD), **merge_sizes(workspace), P=places, PP=padded,
        num_warps=min(16, max(4, padded // PLACES_A_WARP)),
    )  # fmt: skip
    return o_BRHD
