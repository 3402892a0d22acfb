"""Decode attention of one or two query rows over a whole low-bit cache, with some tokens exact.

Replaces ``specache.past_tokens`` and ``attention.step_attention``: codes are unpacked in registers, nothing is written
back. Flash-decoding: the blocks of bytes of a KV head are cut into ``splits`` programs, and one more program takes what
is exact: the chosen pairs, the ring of recent tokens and the step's own rows. Marked tokens, those with a chosen pair,
are left out elsewhere: the softmax does not care where a token lies. The last program of a head merges the partial
results in a fixed order.

Dequantisation is folded into the factors. A code becomes the float ``n = 1 + code / 2^bits`` by putting it into the
fraction's highest bits: two integer operations, no conversion. A number is ``zero + scale code``, so with
``f = 2^bits scale`` it is ``f n + (zero - f)``. Keys of a group share f per channel: q f goes into the product, and
``sum(q zero - q f)`` is added to all its tokens. Values have f per token: the same with the weights. Both sums use the
factors as rounded for the product, so the ones cancel exactly.

The last row's logits, base 2, go to ``logits_BHT`` by position; ``lowbit_top.py`` makes probabilities of them.
Bytes of a token and KV head at D 128 in 16 bits: 64 of codes, 16 of levels, 1 of marks, and 4 G written.
Suffixes: B sequences, R rows, H query heads, K KV heads, G = H / K, M = R G query rows of a KV head (padded to 16),
D head size, W tokens of a group, P blocks of bytes, N groups, T tokens, C groups of E channels (1 or 2), S chosen
tokens, X = K and V, L = scale and zero, Z splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.kernels.sparse_attention import (
    LOG2_E,
    MERGED_ROWS,
    PADDED_ROWS,
    TRITON_TYPES,
    SparseAttentionWorkspace,
    _factor_type,
    _merge,
)

# About four programs a multiprocessor of an H200; more splits make the merge dear.
WANTED_PROGRAMS = 512
MAX_SPLITS = 64
# What tl.dot takes at least; the tile of the step's own rows.
SMALLEST_TILE = 16
NUM_WARPS = 4
NUM_STAGES = 2


class LowBitTokens(NamedTuple):
    """Where the past lies. Codes and levels as in ``baselines.lowbit.LowBitCache``.

    marked_BKT (int8): 1 for a token with a chosen pair. pairs_BKSXCD: their keys and values (C = 1 token each), the one
    of ``chosen_BKS`` (int64 positions, below 0 for none) in slot ``slot_BKS`` (int32). length_B (int64): tokens.
    """

    key_codes_BKPWD: Tensor
    key_levels_BKNLD: Tensor
    value_codes_BKPWD: Tensor
    value_levels_BKLCT: Tensor
    ring_BKXWD: Tensor
    marked_BKT: Tensor
    pairs_BKSXCD: Tensor
    slot_BKS: Tensor
    chosen_BKS: Tensor
    length_B: Tensor

    @property
    def bits(self) -> int:
        """8 over the number of groups in a block of bytes."""
        return 8 * self.key_codes_BKPWD.shape[2] // self.key_levels_BKNLD.shape[2]


def wanted_splits(heads: int, blocks: int) -> int:
    """Programs a head for its low-bit tokens: enough to fill the GPU, each at least one block."""
    return max(1, min(WANTED_PROGRAMS // heads, MAX_SPLITS, blocks))


@triton.jit
def _into_fraction(word, j: tl.constexpr, BITS: tl.constexpr, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """Bit pattern of ``1 + code / 2^BITS`` for floats of ``FRACTION`` fraction bits and that exponent bias."""
    code = (word >> (BITS * j)) & ((1 << BITS) - 1)
    return (code << (FRACTION - BITS)) | (BIAS << FRACTION)


@triton.jit
def _numbers(packed, j: tl.constexpr, BITS: tl.constexpr, FACTOR: tl.constexpr):
    """``1 + code / 2^BITS`` of the j-th code of each byte."""
    if tl.float32 == FACTOR:
        pattern = _into_fraction(packed.to(tl.int32), j, BITS, 23, 127)
    elif tl.float16 == FACTOR:
        pattern = _into_fraction(packed.to(tl.int16), j, BITS, 10, 15)
    else:
        pattern = _into_fraction(packed.to(tl.int16), j, BITS, 7, 127)
    return pattern.to(FACTOR, bitcast=True)


@triton.jit
def _weigh(score_MT, peak_M, total_M):
    """Weights of a tile in the online softmax (base 2), and by how much the earlier tiles' shrink.

    A row that has seen no token yet has peak -inf.
    """
    higher_M = tl.maximum(peak_M, tl.max(score_MT, axis=1))
    # Without the zero, -inf - -inf would make NaN of a row with no token so far.
    reference_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
    weight_MT = tl.exp2(score_MT - reference_M[:, None])
    shrink_M = tl.exp2(peak_M - reference_M)
    return weight_MT, shrink_M, higher_M, total_M * shrink_M + tl.sum(weight_MT, axis=1)


@triton.jit
def _low_scores(
    q_MD, packed_TD, levels_ptr, exist, j: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, FACTOR: tl.constexpr
):
    """Dot products of the queries with the j-th group of a block; ``levels_ptr`` is that group's."""
    d = tl.arange(0, D)
    scale_D = tl.load(levels_ptr + d, mask=exist & (d < D), other=0.0).to(tl.float32)
    zero_D = tl.load(levels_ptr + D + d, mask=exist & (d < D), other=0.0).to(tl.float32)
    factor_MD = (q_MD * (scale_D * (1 << BITS))[None, :]).to(FACTOR)
    rest_M = tl.sum(q_MD * zero_D[None, :] - factor_MD.to(tl.float32), axis=1)
    number_TD = _numbers(packed_TD, j, BITS, FACTOR)
    return tl.dot(factor_MD, tl.trans(number_TD), input_precision="ieee") + rest_M[:, None]


@triton.jit
def _add_low_values(
    o_ME, weight_MT, shrink_M, packed_TE, levels_T, zero_offset, exists_T, j: tl.constexpr, BITS: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Weighted sum of the j-th group's values, one group of channels; ``levels_T`` points to the tokens' scales."""
    scale_T = tl.load(levels_T, mask=exists_T, other=0.0).to(tl.float32)
    zero_T = tl.load(levels_T + zero_offset, mask=exists_T, other=0.0).to(tl.float32)
    factor_MT = (weight_MT * (scale_T * (1 << BITS))[None, :]).to(FACTOR)
    rest_M = tl.sum(weight_MT * zero_T[None, :] - factor_MT.to(tl.float32), axis=1)
    number_TE = _numbers(packed_TE, j, BITS, FACTOR)
    return tl.dot(factor_MT, number_TE, o_ME * shrink_M[:, None] + rest_M[:, None], input_precision="ieee")


@triton.jit
def _add_exact(
    q_MD, key_T, value_T, exists_T, allowed_MT, peak_M, total_M, lo_ME, hi_ME, scale, D: tl.constexpr,
    E: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One tile of exact tokens, given the addresses of their keys and values; its scores come first."""
    d, e = tl.arange(0, D)[None, :], tl.arange(0, E)[None, :]
    real_T1 = exists_T[:, None]
    key_TD = tl.load(key_T[:, None] + d, mask=real_T1, other=0.0).to(FACTOR)
    score_MT = tl.dot(q_MD.to(FACTOR), tl.trans(key_TD), input_precision="ieee") * scale
    score_MT = tl.where(allowed_MT & exists_T[None, :], score_MT, float("-inf"))
    weight_MT, shrink_M, peak_M, total_M = _weigh(score_MT, peak_M, total_M)
    weight_MT = weight_MT.to(FACTOR)
    lo_TE = tl.load(value_T[:, None] + e, mask=real_T1, other=0.0).to(FACTOR)
    lo_ME = tl.dot(weight_MT, lo_TE, lo_ME * shrink_M[:, None], input_precision="ieee")
    if D > E:
        hi_TE = tl.load(value_T[:, None] + E + e, mask=real_T1, other=0.0).to(FACTOR)
        hi_ME = tl.dot(weight_MT, hi_TE, hi_ME * shrink_M[:, None], input_precision="ieee")
    return score_MT, peak_M, total_M, lo_ME, hi_ME


@triton.jit
def _keep(score_MT, logits_M, last_M, token_T, kept_T):
    """The last row's scores to their positions; ``logits_M`` points to the rows of the query heads."""
    tl.store(logits_M[:, None] + token_T[None, :], score_MT, mask=last_M[:, None] & kept_T[None, :])


@triton.jit
def _low_tokens(
    q_MD, key_codes_ptr, key_levels_ptr, value_codes_ptr, value_levels_ptr, marked_ptr, logits_M, last_M, low, first,
    end, tokens, peak_M, total_M, lo_ME, hi_ME, scale, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BITS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """The tokens before ``low`` of blocks ``first`` to ``end``. Pointers are those of the head."""
    PACK: tl.constexpr = 8 // BITS
    w, d, e = tl.arange(0, W), tl.arange(0, D), tl.arange(0, E)
    # From a scale to its zero.
    to_zero = tokens * (D // E)
    for block in range(first, end):
        byte_W1 = (block * W + w).to(tl.int64)[:, None] * D
        key_WD = tl.load(key_codes_ptr + byte_W1 + d[None, :])
        lo_WE = tl.load(value_codes_ptr + byte_W1 + e[None, :])
        if D > E:
            hi_WE = tl.load(value_codes_ptr + byte_W1 + E + e[None, :])
        for j in tl.static_range(PACK):
            group = block * PACK + j
            token_W = group * W + w
            in_low_bits_W = token_W < low
            levels_ptr = key_levels_ptr + group * (2 * D)
            score_MW = _low_scores(q_MD, key_WD, levels_ptr, group * W < low, j, BITS, D, FACTOR) * scale
            exists_W = in_low_bits_W & (tl.load(marked_ptr + token_W, mask=in_low_bits_W, other=1) == 0)
            _keep(score_MW, logits_M, last_M, token_W, exists_W)
            score_MW = tl.where(exists_W[None, :], score_MW, float("-inf"))
            weight_MW, shrink_M, peak_M, total_M = _weigh(score_MW, peak_M, total_M)
            levels_W = value_levels_ptr + token_W
            lo_ME = _add_low_values(
                lo_ME, weight_MW, shrink_M, lo_WE, levels_W, to_zero, in_low_bits_W, j, BITS, FACTOR
            )
            if D > E:
                levels_W += tokens
                hi_ME = _add_low_values(
                    hi_ME, weight_MW, shrink_M, hi_WE, levels_W, to_zero, in_low_bits_W, j, BITS, FACTOR
                )
    return peak_M, total_M, lo_ME, hi_ME


@triton.jit
def _exact_tokens(
    q_MD, pairs_ptr, slot_ptr, chosen_ptr, ring_ptr, marked_ptr, k_ptr, v_ptr, k_stride_r, v_stride_r, logits_M,
    last_M, row_M, length, room, peak_M, total_M, lo_ME, hi_ME, scale, R: tl.constexpr, S: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, OWN: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """The chosen pairs, the rest of the ring, and the step's own rows. Pointers are those of the head."""
    w, all_M1 = tl.arange(0, W), (row_M >= 0)[:, None]
    for first in range(0, S, W):
        place_W = first + w
        token_W = tl.load(chosen_ptr + place_W, mask=place_W < S, other=-1)
        exists_W = token_W >= 0
        pair_W = pairs_ptr + tl.load(slot_ptr + place_W, mask=exists_W, other=0) * (2 * D)
        score_MW, peak_M, total_M, lo_ME, hi_ME = _add_exact(
            q_MD, pair_W, pair_W + D, exists_W, all_M1, peak_M, total_M, lo_ME, hi_ME, scale, D, E, FACTOR
        )
        _keep(score_MW, logits_M, last_M, token_W, exists_W)
    token_W = length - 1 - (length - 1 - w + W) % W
    exists_W = token_W >= 0
    exists_W &= tl.load(marked_ptr + token_W, mask=exists_W, other=1) == 0
    ring_W = ring_ptr + w * D
    score_MW, peak_M, total_M, lo_ME, hi_ME = _add_exact(
        q_MD, ring_W, ring_W + W * D, exists_W, all_M1, peak_M, total_M, lo_ME, hi_ME, scale, D, E, FACTOR
    )
    _keep(score_MW, logits_M, last_M, token_W, exists_W)
    r = tl.arange(0, OWN)
    key_R, value_R = k_ptr + r.to(tl.int64) * k_stride_r, v_ptr + r.to(tl.int64) * v_stride_r
    seen_MR = r[None, :] <= row_M[:, None]
    score_MR, peak_M, total_M, lo_ME, hi_ME = _add_exact(
        q_MD, key_R, value_R, r < R, seen_MR, peak_M, total_M, lo_ME, hi_ME, scale, D, E, FACTOR
    )
    # A sequence that is full has no place for row 0.
    _keep(score_MR, logits_M, last_M, length + r, (r < R - 1) & (length + r < room))
    return peak_M, total_M, lo_ME, hi_ME


@triton.jit
def _lowbit_attention_kernel(
    q_ptr, k_ptr, v_ptr, key_codes_ptr, key_levels_ptr, value_codes_ptr, value_levels_ptr, ring_ptr, marked_ptr,
    pairs_ptr, slot_ptr, chosen_ptr, length_ptr, partial_ptr, peak_ptr, total_ptr, arrived_ptr, logits_ptr, o_ptr,
    scale, blocks, room, q_stride_b, q_stride_r, q_stride_h, k_stride_b, k_stride_r, k_stride_k, v_stride_b,
    v_stride_r, v_stride_k, K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, ZZ: tl.constexpr, M: tl.constexpr, MM: tl.constexpr,
    BITS: tl.constexpr, OWN: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    PACK: tl.constexpr = 8 // BITS
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, kv_head = head // K, head % K
    m, d, e = tl.arange(0, M), tl.arange(0, D), tl.arange(0, E)
    row_M, group_M = m // G, m % G
    q_M = b * q_stride_b + row_M * q_stride_r + (kv_head * G + group_M) * q_stride_h
    q_MD = tl.load(q_ptr + q_M[:, None] + d[None, :], mask=(m < R * G)[:, None], other=0.0).to(tl.float32)
    logits_M, last_M = logits_ptr + (head * G + group_M) * room, row_M == R - 1
    length = tl.load(length_ptr + b).to(tl.int32)
    tokens = blocks * (PACK * W)
    marked_ptr += head * tokens
    peak_M, total_M = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    lo_ME, hi_ME = tl.zeros((M, E), tl.float32), tl.zeros((M, E), tl.float32)
    if split < Z - 1:
        # The values of tokens before this one are in low bits, and so are their keys.
        low = tl.maximum(length - W, 0)
        used = tl.cdiv(low, PACK * W)
        peak_M, total_M, lo_ME, hi_ME = _low_tokens(
            q_MD, key_codes_ptr + head * blocks * (W * D), key_levels_ptr + head * blocks * (PACK * 2 * D),
            value_codes_ptr + head * blocks * (W * D), value_levels_ptr + head * tokens * (2 * (D // E)), marked_ptr,
            logits_M, last_M, low, split * used // (Z - 1), (split + 1) * used // (Z - 1), tokens, peak_M, total_M,
            lo_ME, hi_ME, scale, W, D, E, BITS, FACTOR,
        )  # fmt: skip
    else:
        peak_M, total_M, lo_ME, hi_ME = _exact_tokens(
            q_MD, pairs_ptr + head * (S * 2 * D), slot_ptr + head * S, chosen_ptr + head * S,
            ring_ptr + head * (2 * W * D), marked_ptr, k_ptr + b * k_stride_b + kv_head * k_stride_k,
            v_ptr + b * v_stride_b + kv_head * v_stride_k, k_stride_r, v_stride_r, logits_M, last_M, row_M, length,
            room, peak_M, total_M, lo_ME, hi_ME, scale, R, S, W, D, E, OWN, FACTOR,
        )  # fmt: skip
    at_M = (head * Z + split) * M + m
    real_M1 = (m < R * G)[:, None]
    tl.store(partial_ptr + at_M[:, None] * D + e[None, :], lo_ME, mask=real_M1)
    if D > E:
        tl.store(partial_ptr + at_M[:, None] * D + E + e[None, :], hi_ME, mask=real_M1)
    tl.store(peak_ptr + at_M, peak_M)
    tl.store(total_ptr + at_M, total_M)
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel") == Z - 1:
        tl.store(arrived_ptr + head, 0)
        parts = head * (Z * M)
        merged_M, result_MD = _merge(
            partial_ptr + parts * D, peak_ptr + parts, total_ptr + parts, R * G, M, MM, D, Z, ZZ
        )
        o_M = ((b * R + merged_M // G) * (K * G) + kv_head * G + merged_M % G) * D
        result_MD = result_MD.to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + o_M[:, None] + d[None, :], result_MD, mask=(merged_M < R * G)[:, None])


def lowbit_attention(
    q_BRHD: Tensor,
    k_BRKD: Tensor,
    v_BRKD: Tensor,
    tokens: LowBitTokens,
    workspace: SparseAttentionWorkspace,
    logits_BHT: Tensor,
    o_BRHD: Tensor,
) -> Tensor:
    """Attend to all past tokens and, causally, to the step's own rows; fills ``o_BRHD`` and ``logits_BHT``.

    q, k, v (rotated; any strides with the last dimension contiguous), levels, ring and pairs share one dtype: bf16,
    fp16 or fp32. workspace: of at least two splits; the last program takes the exact tokens, the others the low-bit
    ones. logits_BHT (fp32): the last row's logits times log2(e) at the positions of past tokens and of row 0 of two;
    the rest is left alone. R * G up to 16; D and W powers of two from 16 on; D at most 2 groups of channels.
    Raises ``ConfigError`` for other shapes.
    """
    (batch, rows, heads, head_dim), kv_heads = q_BRHD.shape, k_BRKD.shape[2]
    check_shapes(tokens.bits, tokens.ring_BKXWD.shape[3], head_dim, rows * heads // kv_heads)
    _check(q_BRHD, k_BRKD, v_BRKD, tokens, workspace, logits_BHT, o_BRHD)
    merged = triton.next_power_of_2(rows * heads // kv_heads)
    _lowbit_attention_kernel[(batch * kv_heads, workspace.splits)](
        q_BRHD, k_BRKD, v_BRKD, *tokens, workspace.partial_BKZMD, workspace.peak_BKZM, workspace.total_BKZM,
        workspace.arrived_BK, logits_BHT, o_BRHD, head_dim**-0.5 * LOG2_E, tokens.key_codes_BKPWD.shape[2],
        logits_BHT.shape[2], *q_BRHD.stride()[:3], *k_BRKD.stride()[:3], *v_BRKD.stride()[:3],
        K=kv_heads, G=heads // kv_heads, R=rows, S=tokens.chosen_BKS.shape[2], W=tokens.ring_BKXWD.shape[3],
        D=head_dim, E=head_dim // tokens.value_levels_BKLCT.shape[3], Z=workspace.splits,
        ZZ=min(triton.next_power_of_2(workspace.splits), MERGED_ROWS // merged), M=PADDED_ROWS, MM=merged,
        BITS=tokens.bits, OWN=SMALLEST_TILE, FACTOR=_factor_type(q_BRHD.dtype), num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    return o_BRHD


def check_shapes(bits: int, group: int, head_dim: int, queries: int) -> None:
    """Raise ``ConfigError`` for a cache, a head size or a number of query rows a KV head without a kernel."""
    for name, size in (("group", group), ("head_dim", head_dim)):
        ok = size >= SMALLEST_TILE and size & (size - 1) == 0
        require(ok, name, size, f"on a GPU, a power of two from {SMALLEST_TILE} on")
    require(bits in (1, 2), "bits", bits, "1 or 2 on a GPU")
    require(head_dim <= 2 * group, "group", group, f"on a GPU, at least half of head_dim ({head_dim})")
    require(queries <= PADDED_ROWS, "rows * group of query heads", queries, f"at most {PADDED_ROWS}")


def _check(
    q_BRHD: Tensor,
    k_BRKD: Tensor,
    v_BRKD: Tensor,
    tokens: LowBitTokens,
    workspace: SparseAttentionWorkspace,
    logits_BHT: Tensor,
    o_BRHD: Tensor,
) -> None:
    require(q_BRHD.dtype in TRITON_TYPES, "dtype", q_BRHD.dtype, "bfloat16, float16, float32")
    require(workspace.splits >= 2, "splits", workspace.splits, "at least 2")
    require(logits_BHT.dtype == torch.float32, "logits.dtype", logits_BHT.dtype, "float32")
    last_dense = all(t.stride(-1) == 1 for t in (q_BRHD, k_BRKD, v_BRKD))
    dense = all(t.is_contiguous() for t in (*tokens, logits_BHT, o_BRHD))
    require(last_dense and dense, "strides", "strided", "contiguous tensors; q, k, v in the last dimension")
