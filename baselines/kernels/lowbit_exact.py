"""The exact tokens of a low-bit cache's attention, and what all tokens share: the softmax's step, and the logits kept.

Tokens are the long side of both products; the few query rows are their columns.
Suffixes: as in ``lowbit_attention.py``; H = M / 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh(score_TM, peak_M):
    """Weights of a tile in the online softmax (base 2), by how much the earlier tiles' shrink, and the new peak.

    A row that has seen no token yet has peak -inf.
    """
    higher_M = tl.maximum(peak_M, tl.max(score_TM, axis=0))
    # Without the zero, -inf - -inf would make NaN of a row with no token so far.
    reference_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
    return tl.exp2(score_TM - reference_M[None, :]), tl.exp2(peak_M - reference_M), higher_M


@triton.jit
def keep(score_TM, logits_ptr, token_T, kept_TH1, T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """The last row's scores to their tokens' places, two heads at a time as they lie in a thread."""
    m = tl.arange(0, M // 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :] - (R - 1) * G
    at_TH2 = logits_ptr + token_T.to(tl.int64)[:, None, None] * G + m
    tl.store(at_TH2, tl.reshape(score_TM, (T, M // 2, 2)), mask=kept_TH1 & (m >= 0) & (m < G))


@triton.jit
def _add_exact(
    q_DM, key_T, value_T, exists_T, allowed_TM, peak_M, total_TM, lo_EM, hi_EM, scale, D: tl.constexpr,
    E: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One tile of exact tokens, given the addresses of their keys and values; its scores come first."""
    d, e = tl.arange(0, D)[None, :], tl.arange(0, E)[None, :]
    real_T1 = exists_T[:, None]
    key_TD = tl.load(key_T[:, None] + d, mask=real_T1, other=0.0).to(FACTOR)
    score_TM = tl.dot(key_TD, q_DM.to(FACTOR), input_precision="ieee") * scale
    score_TM = tl.where(allowed_TM & real_T1, score_TM, float("-inf"))
    weight_TM, shrink_M, peak_M = weigh(score_TM, peak_M)
    total_TM = total_TM * shrink_M[None, :] + weight_TM
    weight_TM = weight_TM.to(FACTOR)
    lo_ET = tl.trans(tl.load(value_T[:, None] + e, mask=real_T1, other=0.0).to(FACTOR))
    lo_EM = tl.dot(lo_ET, weight_TM, lo_EM * shrink_M[None, :], input_precision="ieee")
    if D > E:
        hi_ET = tl.trans(tl.load(value_T[:, None] + E + e, mask=real_T1, other=0.0).to(FACTOR))
        hi_EM = tl.dot(hi_ET, weight_TM, hi_EM * shrink_M[None, :], input_precision="ieee")
    return score_TM, peak_M, total_TM, lo_EM, hi_EM


@triton.jit
def exact_tokens(
    q_DM, pairs_ptr, slot_ptr, chosen_ptr, ring_ptr, marked_ptr, k_ptr, v_ptr, k_stride_r, v_stride_r, logits_ptr,
    row_M, length, room, scale, G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, M: tl.constexpr, W: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, E: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Peak, total and both halves of the output for the chosen pairs, the rest of the ring, and the step's own rows.

    Pointers are those of the head.
    """
    t, all_1M = tl.arange(0, T), (row_M >= 0)[None, :]
    peak_M, total_TM = tl.full((M,), float("-inf"), tl.float32), tl.zeros((T, M), tl.float32)
    lo_EM, hi_EM = tl.zeros((E, M), tl.float32), tl.zeros((E, M), tl.float32)
    for first in range(0, S, T):
        place_T = first + t
        token_T = tl.load(chosen_ptr + place_T, mask=place_T < S, other=-1)
        exists_T = token_T >= 0
        pair_T = pairs_ptr + tl.load(slot_ptr + place_T, mask=exists_T, other=0) * (2 * D)
        score_TM, peak_M, total_TM, lo_EM, hi_EM = _add_exact(
            q_DM, pair_T, pair_T + D, exists_T, all_1M, peak_M, total_TM, lo_EM, hi_EM, scale, D, E, FACTOR
        )
        keep(score_TM, logits_ptr, token_T, exists_T[:, None, None], T, G, R, M)
    for first in range(0, W, T):
        slot_T = first + t
        token_T = length - 1 - (length - 1 - slot_T + W) % W
        exists_T = token_T >= 0
        exists_T &= tl.load(marked_ptr + token_T, mask=exists_T, other=1) == 0
        ring_T = ring_ptr + slot_T * D
        score_TM, peak_M, total_TM, lo_EM, hi_EM = _add_exact(
            q_DM, ring_T, ring_T + W * D, exists_T, all_1M, peak_M, total_TM, lo_EM, hi_EM, scale, D, E, FACTOR
        )
        keep(score_TM, logits_ptr, token_T, exists_T[:, None, None], T, G, R, M)
    key_T, value_T = k_ptr + t.to(tl.int64) * k_stride_r, v_ptr + t.to(tl.int64) * v_stride_r
    seen_TM = t[:, None] <= row_M[None, :]
    score_TM, peak_M, total_TM, lo_EM, hi_EM = _add_exact(
        q_DM, key_T, value_T, t < R, seen_TM, peak_M, total_TM, lo_EM, hi_EM, scale, D, E, FACTOR
    )
    # A sequence that is full has no place for row 0.
    kept_T = (t < R - 1) & (length + t < room)
    keep(score_TM, logits_ptr, length + t, kept_T[:, None, None], T, G, R, M)
    return peak_M, tl.sum(total_TM, axis=0), lo_EM, hi_EM
