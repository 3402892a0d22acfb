"""Decode attention of one or two query rows over a whole low-bit cache, with some tokens exact.

Replaces ``specache.past_tokens`` and ``attention.step_attention``: codes are unpacked in registers, nothing is written
back. Flash-decoding: the blocks of words of a KV head are cut into ``splits`` programs, and one more program takes what
is exact: the chosen pairs, the ring of recent tokens and the step's own rows. Marked tokens, those with a chosen pair,
are left out elsewhere: the softmax does not care where a token lies. The last program of a head merges the partial
results in a fixed order.

Instructions are few: ``lowbit_products.py`` says how few a code takes, ``lowbit_tiles.py`` how they stay in the thread
that loaded them. A program is one warp that fills its registers, so only two find room beside each other on a
scheduler. Sums over tokens stay apart by thread until the end; only the peak is shared in each turn.

The last row's logits, base 2, go to ``logits_BKTG`` by position; ``lowbit_top.py`` makes probabilities of them.
Bytes of a token and KV head at D 128 in 16 bits: 64 of codes, 16 of levels, 1 of marks, and 4 G written.
Suffixes: B sequences, R rows, H query heads, K KV heads, G = H / K, M = R G query rows of a KV head (padded), D head
size, W tokens of a group, P blocks of words, N groups, T tokens of a tile or of all, C groups of E channels (1 or 2),
S chosen tokens, X = K and V, L = scale and zero, Z splits. In the loop as in ``lowbit_tiles.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baselines.kernels.lowbit_exact import exact_tokens, keep, weigh
from baselines.kernels.lowbit_products import NumberFormat, add_low_values, low_scores, turned, zero_scores
from baselines.kernels.lowbit_tiles import (
    by_column,
    load_key_levels,
    load_keys,
    load_marks,
    load_queries,
    load_value_levels,
    load_values,
    of_rows,
    row_tokens,
    run_tokens,
    sum_by_thread,
)
from dualdecoder.errors import require
from dualdecoder.kernels.online_softmax import LOG2_E, PADDED_ROWS, TRITON_TYPES, factor_type, finish_split
from dualdecoder.kernels.sparse_attention import SparseAttentionWorkspace

# Eight programs for each of an H200's 132 multiprocessors, all at once: the registers of a thread are full. A single
# sequence has fewer, because its merge is done by one warp.
WANTED_PROGRAMS = 8 * 132
MAX_SPLITS = 64
# What tl.dot takes at least: channels or tokens that are summed, and query rows.
SMALLEST_TILE = 16
FEWEST_COLUMNS = 8
# One warp, as lowbit_tiles.py says, and as many tokens as its registers hold. Without matrix units, products spill.
NUM_WARPS = 1
NUM_WARPS_FP32 = 8
TILE_TOKENS = 32
NUM_STAGES = 1
# Partial results that the merge holds in registers.
MERGED_SPLITS = 4


class LowBitTokens(NamedTuple):
    """Where the past lies. Codes and levels as in ``baselines.lowbit.LowBitCache``.

    marked_BKT (int8): 1 for a token with a chosen pair. pairs_BKSXCD: their keys and values (C = 1 token each), the one
    of ``chosen_BKS`` (int64 positions, below 0 for none) in slot ``slot_BKS`` (int32). length_B (int64): tokens.
    """

    key_codes_BKPWD: Tensor
    key_levels_BKNLD: Tensor
    value_codes_BKPDW: Tensor
    value_levels_BKLCT: Tensor
    ring_BKXWD: Tensor
    marked_BKT: Tensor
    pairs_BKSXCD: Tensor
    slot_BKS: Tensor
    chosen_BKS: Tensor
    length_B: Tensor

    @property
    def bits(self) -> int:
        """16 over the number of groups in a block of words."""
        return 16 * self.key_codes_BKPWD.shape[2] // self.key_levels_BKNLD.shape[2]


def wanted_splits(heads: int, blocks: int) -> int:
    """Programs a head for its low-bit tokens, beside the one for exact ones, each of at least one block."""
    return max(1, min(WANTED_PROGRAMS // heads - 1, MAX_SPLITS, blocks))


@triton.jit
def _levels(
    key_levels_ptr, value_levels_ptr, marked_ptr, group, first, low, tokens, T: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's keys, scales and zeros of both halves of its values, and the marks of its tokens."""
    # From a scale to its zero.
    to_zero = tokens * (D // E)
    scale_XI = load_key_levels(key_levels_ptr, group, low, M, 0, W, D)
    lo_scale_A4J, lo_zero_A4J = load_value_levels(value_levels_ptr, first, low, to_zero, T)
    hi_scale_A4J, hi_zero_A4J = lo_scale_A4J, lo_zero_A4J
    if D > E:
        hi_scale_A4J, hi_zero_A4J = load_value_levels(value_levels_ptr + tokens, first, low, to_zero, T)
    marked_A4J = load_marks(marked_ptr, first, low, T)
    return scale_XI, lo_scale_A4J, lo_zero_A4J, hi_scale_A4J, hi_zero_A4J, marked_A4J


@triton.jit
def _words(key_words_ptr, value_words_ptr, block, part, T: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Of a part of a block: keys, and both halves of the values, turned to the first byte."""
    value_words_ptr += block * (W * D // 2) + part * (T // 2)
    key_XV = turned(load_keys(key_words_ptr + block * (W * D // 2) + part * (T * D // 2), T, D), -LIFT & 31)
    lo_EV = turned(load_values(value_words_ptr, T, W, E), -LIFT & 31)
    hi_EV = lo_EV
    if D > E:
        hi_EV = turned(load_values(value_words_ptr + E * (W // 2), T, W, E), -LIFT & 31)
    return key_XV, lo_EV, hi_EV


@triton.jit
def _row(x_NM, n):
    return tl.sum(tl.where(tl.arange(0, x_NM.shape[0])[:, None] == n, x_NM, 0.0), axis=0)


@triton.jit
def _low_tokens(
    wide_q_XI, key_words_ptr, key_levels_ptr, value_words_ptr, value_levels_ptr, marked_ptr, logits_ptr, low, begin,
    end, tokens, scale, G: tl.constexpr, R: tl.constexpr, M: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr, LIFT: tl.constexpr, KEY_GAIN: tl.constexpr,
    VALUE_GAIN: tl.constexpr, KEY_BACK: tl.constexpr, VALUE_BACK: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Peak, total and both halves of the output for the tokens before ``low`` of parts ``begin`` to ``end`` of blocks.

    Pointers are those of the head; words are of 32 bits.
    """
    PLACES: tl.constexpr = 8 // BITS
    peak_M, total_AM = tl.full((M,), float("-inf"), tl.float32), tl.zeros((8, M), tl.float32)
    lo_EM, lo_rest_AM = tl.zeros((E, M), tl.float32), tl.zeros((8, M), tl.float32)
    hi_EM, hi_rest_AM = tl.zeros((E, M), tl.float32), tl.zeros((8, M), tl.float32)
    for tile in range(begin, end):
        block, part = tile // (W // T), tile % (W // T)
        group, first = block * (2 * PLACES), block * (2 * PLACES * W) + part * T
        key_XV, lo_EV, hi_EV = _words(key_words_ptr, value_words_ptr, block, part, T, W, D, E, LIFT)
        zero_NM = zero_scores(wide_q_XI, key_levels_ptr + D, group, low, 2 * PLACES, W, D, M, FACTOR)
        zero_NM = zero_NM * (scale / KEY_GAIN)
        scale_XI, lo_scale, lo_zero, hi_scale, hi_zero, marked = _levels(
            key_levels_ptr, value_levels_ptr, marked_ptr, group, first, low, tokens, T, W, D, E, M
        )
        # Loops, not unrolled: so many bodies would not fit the instruction cache.
        for byte in range(2):
            mask, step = ((1 << BITS) - 1 << LIFT) * 0x10001, 1.0
            for place in range(PLACES):
                # In flight for one turn; after the last one, nothing.
                ahead = tl.where(byte * PLACES + place < 2 * PLACES - 1, low, 0)
                following = _levels(
                    key_levels_ptr, value_levels_ptr, marked_ptr, group + 1, first + W, ahead, tokens, T, W, D, E, M
                )
                exists = (marked == 0) & (run_tokens(first, T, T // 8) < low)
                score_TM = low_scores(wide_q_XI, scale_XI, key_XV, mask, T, D, M, FACTOR) * (scale * KEY_BACK * step)
                score_TM += _row(zero_NM, byte * PLACES + place)[None, :]
                exists_TH1 = of_rows(exists, T, M)
                keep(score_TM, logits_ptr, row_tokens(first, T), exists_TH1, T, G, R, M)
                score_TM = tl.where(by_column(exists_TH1, T, M), score_TM, float("-inf"))
                weight_TM, shrink_M, peak_M = weigh(score_TM, peak_M)
                total_AM = total_AM * shrink_M[None, :] + sum_by_thread(weight_TM, T, M)
                lo_EM, lo_rest_AM = add_low_values(
                    lo_EM, lo_rest_AM, weight_TM, shrink_M, lo_EV, lo_scale, lo_zero, exists, mask, VALUE_GAIN * step,
                    T, E, M, FACTOR,
                )  # fmt: skip
                if D > E:
                    hi_EM, hi_rest_AM = add_low_values(
                        hi_EM, hi_rest_AM, weight_TM, shrink_M, hi_EV, hi_scale, hi_zero, exists, mask,
                        VALUE_GAIN * step, T, E, M, FACTOR,
                    )  # fmt: skip
                mask, step, group, first = mask << BITS, step * (1 / (1 << BITS)), group + 1, first + W
                scale_XI, lo_scale, lo_zero, hi_scale, hi_zero, marked = following
            key_XV, lo_EV, hi_EV = turned(key_XV, 8), turned(lo_EV, 8), turned(hi_EV, 8)
    lo_EM = lo_EM * VALUE_BACK + tl.sum(lo_rest_AM, axis=0)[None, :]
    hi_EM = hi_EM * VALUE_BACK + tl.sum(hi_rest_AM, axis=0)[None, :]
    return peak_M, tl.sum(total_AM, axis=0), lo_EM, hi_EM


@triton.jit
def _lowbit_attention_kernel(
    q_ptr, k_ptr, v_ptr, key_words_ptr, key_levels_ptr, value_words_ptr, value_levels_ptr, ring_ptr, marked_ptr,
    pairs_ptr, slot_ptr, chosen_ptr, length_ptr, partial_ptr, peak_ptr, total_ptr, arrived_ptr, logits_ptr, o_ptr,
    scale, blocks, room, q_stride_b, q_stride_r, q_stride_h, k_stride_b, k_stride_r, k_stride_k, v_stride_b, v_stride_r,
    v_stride_k, K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, Z: tl.constexpr, ZZ: tl.constexpr, M: tl.constexpr, STORED: tl.constexpr,
    BITS: tl.constexpr, LIFT: tl.constexpr, KEY_GAIN: tl.constexpr, VALUE_GAIN: tl.constexpr, KEY_BACK: tl.constexpr,
    VALUE_BACK: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    PACK: tl.constexpr = 16 // BITS
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, kv_head = head // K, head % K
    m, d, e = tl.arange(0, M), tl.arange(0, D), tl.arange(0, E)
    row_M, group_M = m // G, m % G
    q_ptr += b * q_stride_b + kv_head * G * q_stride_h
    logits_ptr += head * G * room
    length = tl.load(length_ptr + b).to(tl.int32)
    tokens = blocks * (PACK * W)
    marked_ptr += head * tokens
    if split < Z - 1:
        # The values of tokens before this one are in low bits, and so are their keys.
        low = tl.maximum(length - W, 0)
        used = tl.cdiv(low, PACK * W) * (W // T)
        q_XI = load_queries(q_ptr, q_stride_r, q_stride_h, G, R, M, D).to(FACTOR)
        peak_M, total_M, lo_EM, hi_EM = _low_tokens(
            (q_XI * KEY_GAIN).to(FACTOR), key_words_ptr + head * blocks * (W * D // 2),
            key_levels_ptr + head * blocks * (PACK * 2 * D), value_words_ptr + head * blocks * (W * D // 2),
            value_levels_ptr + head * tokens * (2 * (D // E)), marked_ptr, logits_ptr, low, split * used // (Z - 1),
            (split + 1) * used // (Z - 1), tokens, scale, G, R, M, W, T, D, E, BITS, LIFT, KEY_GAIN, VALUE_GAIN,
            KEY_BACK, VALUE_BACK, FACTOR,
        )  # fmt: skip
    else:
        q_M = row_M * q_stride_r + group_M * q_stride_h
        q_DM = tl.load(q_ptr + q_M[None, :] + d[:, None], mask=(m < R * G)[None, :], other=0.0)
        peak_M, total_M, lo_EM, hi_EM = exact_tokens(
            q_DM, pairs_ptr + head * (S * 2 * D), slot_ptr + head * S, chosen_ptr + head * S,
            ring_ptr + head * (2 * W * D), marked_ptr, k_ptr + b * k_stride_b + kv_head * k_stride_k,
            v_ptr + b * v_stride_b + kv_head * v_stride_k, k_stride_r, v_stride_r, logits_ptr, row_M, length, room,
            scale, G, R, S, M, W, T, D, E, FACTOR,
        )  # fmt: skip
    at_M, real_M = (head * Z + split) * STORED + m, m < R * G
    tl.store(partial_ptr + at_M[None, :] * D + e[:, None], lo_EM, mask=real_M[None, :])
    if D > E:
        tl.store(partial_ptr + at_M[None, :] * D + E + e[:, None], hi_EM, mask=real_M[None, :])
    finish_split(
        peak_M, total_M, partial_ptr, peak_ptr, total_ptr, arrived_ptr, o_ptr, head, split, K, G, R, D, Z, ZZ, STORED, M
    )


def lowbit_attention(
    q_BRHD: Tensor,
    k_BRKD: Tensor,
    v_BRKD: Tensor,
    tokens: LowBitTokens,
    workspace: SparseAttentionWorkspace,
    logits_BKTG: Tensor,
    o_BRHD: Tensor,
) -> Tensor:
    """Attend to all past tokens and, causally, to the step's own rows; fills ``o_BRHD`` and ``logits_BKTG``.

    q, k, v (rotated; any strides with the last dimension contiguous), levels, ring and pairs share one dtype: bf16,
    fp16 or fp32. workspace: of at least two splits; the last program takes the exact tokens, the others the low-bit
    ones. logits_BKTG (fp32): the last row's logits times log2(e) at the positions of past tokens and of row 0 of two;
    the rest is left alone. R * G up to 16; D and W powers of two from 16 on; D at most 2 groups of channels.
    Raises ``ConfigError`` for other shapes.
    """
    (batch, rows, heads, head_dim), kv_heads = q_BRHD.shape, k_BRKD.shape[2]
    check_shapes(tokens.bits, tokens.ring_BKXWD.shape[3], head_dim, rows * heads // kv_heads)
    _check(q_BRHD, k_BRKD, v_BRKD, tokens, workspace, logits_BKTG, o_BRHD)
    columns = max(FEWEST_COLUMNS, triton.next_power_of_2(rows * heads // kv_heads))
    factor = factor_type(q_BRHD.dtype)
    number = NumberFormat.of(factor)
    words = tokens._replace(
        key_codes_BKPWD=tokens.key_codes_BKPWD.view(torch.int32),
        value_codes_BKPDW=tokens.value_codes_BKPDW.view(torch.int32),
    )
    _lowbit_attention_kernel[(batch * kv_heads, workspace.splits)](
        q_BRHD, k_BRKD, v_BRKD, *words, workspace.partial_BKZMD, workspace.peak_BKZM, workspace.total_BKZM,
        workspace.arrived_BK, logits_BKTG, o_BRHD, head_dim**-0.5 * LOG2_E, tokens.key_codes_BKPWD.shape[2],
        logits_BKTG.shape[2], *q_BRHD.stride()[:3], *k_BRKD.stride()[:3], *v_BRKD.stride()[:3],
        K=kv_heads, G=heads // kv_heads, R=rows, S=tokens.chosen_BKS.shape[2], W=tokens.ring_BKXWD.shape[3],
        T=min(tokens.ring_BKXWD.shape[3], TILE_TOKENS),
        D=head_dim, E=head_dim // tokens.value_levels_BKLCT.shape[3], Z=workspace.splits,
        ZZ=min(triton.next_power_of_2(workspace.splits), MERGED_SPLITS), M=columns, STORED=PADDED_ROWS,
        BITS=tokens.bits, LIFT=number.lift, KEY_GAIN=number.key_gain, VALUE_GAIN=number.value_gain,
        KEY_BACK=number.key_back, VALUE_BACK=number.value_back, FACTOR=factor,
        num_warps=NUM_WARPS_FP32 if q_BRHD.dtype == torch.float32 else NUM_WARPS, num_stages=NUM_STAGES,
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
    logits_BKTG: Tensor,
    o_BRHD: Tensor,
) -> None:
    require(q_BRHD.dtype in TRITON_TYPES, "dtype", q_BRHD.dtype, "bfloat16, float16, float32")
    require(workspace.splits >= 2, "splits", workspace.splits, "at least 2")
    require(logits_BKTG.dtype == torch.float32, "logits.dtype", logits_BKTG.dtype, "float32")
    last_dense = all(t.stride(-1) == 1 for t in (q_BRHD, k_BRKD, v_BRKD))
    dense = all(t.is_contiguous() for t in (*tokens, logits_BKTG, o_BRHD))
    (batch, kv_heads), room = tokens.marked_BKT.shape[:2], tokens.value_levels_BKLCT.shape[-1]
    assert tokens.marked_BKT.shape[2] == room, "a mark for every token that there is room for"
    assert workspace.arrived_BK.shape == logits_BKTG.shape[:2] == (batch, kv_heads), "a workspace of this batch"
    require(last_dense and dense, "strides", "strided", "contiguous tensors; q, k, v in the last dimension")
