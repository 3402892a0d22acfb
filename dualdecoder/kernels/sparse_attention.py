"""Decode attention of one or two query rows over the selected chunks, the outliers and the recent window.

Replaces ``DualDecoder._past`` and ``attention.step_attention``: nothing is gathered, every key and value is read once
where it lies. The tokens of a KV head are numbered in one sequence: selected chunks in selection order (their records
are found through the slot table), outlier chunks, window slots, then the step's own rows. The sequence is cut into
tiles, the tiles into ``splits`` of about equal size, one program a split (flash-decoding). The program of a head that
finishes last merges the partial results in an order that the shapes fix, so no bit of the result depends on who was
last, nor on where the chunks lie.

Bytes read: B K (S + O) records (4 KiB at D 128 in 16 bits), the filled part of the window; empty places cost nothing.
Suffixes: B sequences, R rows, H query heads, K KV heads, G = H / K, M = R G query rows of a KV head (padded to 16),
D head size, S selected chunks, V slots of the buffer, O outlier chunks, SO = S + O, C tokens of a chunk,
W tokens of the window, X = K and V, Z splits, T tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.kernels.online_softmax import (
    LOG2_E,
    MERGED_ROWS,
    PADDED_ROWS,
    TRITON_TYPES,
    absorb,
    factor_type,
    finish_split,
)
from dualdecoder.ledger import Ledger

# About four programs for each of an H200's 132 multiprocessors; more than MAX_SPLITS make the merge dear. These and
# the launch parameters are the fastest of a sweep over tile, warps, stages and splits (8B shapes, batch 1, 8, 24).
WANTED_PROGRAMS = 512
MAX_SPLITS = 16


@dataclass(frozen=True)
class Tuning:
    """Launch parameters."""

    tile_tokens: int = 64
    num_warps: int = 2
    num_stages: int = 2


DEFAULT_TUNING = Tuning()
# Without matrix units the products are multiply-adds, which spill registers with few warps.
FP32_TUNING = Tuning(tile_tokens=32, num_warps=8, num_stages=3)


class Places(NamedTuple):
    """Where the past lies. Entries below 0 in ``chosen_BKS`` and ``outlier_BKO`` are empty places.

    records_BKVXCD: the chunk buffer; slot_BKS (int32): slot of each chosen chunk, below 0 for one that is not in the
        buffer; chosen_BKS (int64), any stride between sequences.
    outlier_records_BKOXCD, outlier_BKO (int64).
    window_BKXWD: position ``p`` in slot ``p % W``; it holds positions ``[start_B, length_B)`` (int64).
    host_AKNXCD: all chunks, where those without a slot are read; page-locked host memory if the rest is on a GPU.
        Sequence b reads those of b modulo A. None: every chosen chunk has a slot.
    """

    records_BKVXCD: Tensor
    slot_BKS: Tensor
    chosen_BKS: Tensor
    outlier_records_BKOXCD: Tensor
    outlier_BKO: Tensor
    window_BKXWD: Tensor
    start_B: Tensor
    length_B: Tensor
    host_AKNXCD: Tensor | None = None


@dataclass(frozen=True)
class SparseAttentionWorkspace:
    """Partial results of the splits. ``arrived_BK`` is zero between launches: the last program resets it.

    One workspace serves all layers, but not two launches that may run at the same time.
    """

    partial_BKZMD: Tensor
    peak_BKZM: Tensor
    total_BKZM: Tensor
    arrived_BK: Tensor

    @classmethod
    def allocate(
        cls, ledger: Ledger, batch: int, kv_heads: int, head_dim: int, tokens: int, splits: int | None = None
    ) -> SparseAttentionWorkspace:
        """For ``tokens`` = S C + O C + W past tokens; ``splits`` is chosen from the shapes unless given."""
        splits = splits or wanted_splits(batch * kv_heads, tokens)
        lead = (batch, kv_heads, splits, PADDED_ROWS)
        partial, peak, total = (
            ledger.on_device("workspace", shape, torch.float32) for shape in ((*lead, head_dim), lead, lead)
        )
        return cls(partial, peak, total, ledger.on_device("workspace", (batch, kv_heads), torch.int32))

    @property
    def splits(self) -> int:
        return self.peak_BKZM.shape[2]


def wanted_splits(heads: int, tokens: int) -> int:
    """Splits a head: enough programs to fill the GPU, about one tile each or more."""
    tiles = triton.cdiv(tokens, DEFAULT_TUNING.tile_tokens)
    return max(1, min(WANTED_PROGRAMS // heads, MAX_SPLITS, tiles))


@triton.jit
def _existing(
    token_T, slot_ptr, chosen_ptr, outlier_ptr, start, length, S: tl.constexpr, SO: tl.constexpr, W: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Slot and number of each selected token's chunk, and which tokens are real. Pointers are those of the head."""
    place_T = token_T // C
    slot_T = tl.load(slot_ptr + place_T, mask=place_T < S, other=0)
    listed_T = tl.where(place_T < S, chosen_ptr + place_T, outlier_ptr + (place_T - S))
    chunk_T = tl.load(listed_T, mask=place_T < SO, other=-1)
    ring_T = token_T - SO * C
    age_T = ring_T - (start % W).to(tl.int32)
    age_T = tl.where(age_T < 0, age_T + W, age_T)
    in_window_T = (ring_T >= 0) & (ring_T < W) & (age_T < length - start)
    own_T = (ring_T >= W) & (ring_T < W + R)
    return slot_T, chunk_T, (chunk_T >= 0) | in_window_T | own_T


@triton.jit
def _addresses(
    token_T, slot_T, chunk_T, records_ptr, host_ptr, outlier_records_ptr, window_ptr, k_ptr, v_ptr, k_stride_r,
    v_stride_r, S: tl.constexpr, SO: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Addresses of the tokens' keys and values. Pointers are those of the head."""
    place_T, in_chunk_T = token_T // C, (token_T % C) * D
    ring_T = token_T - SO * C
    buffer_T = records_ptr + slot_T.to(tl.int64) * (2 * C * D) + in_chunk_T
    # A missing chunk comes over the link while the rest of the tile comes from the buffer.
    buffer_T = tl.where(slot_T < 0, host_ptr + chunk_T.to(tl.int64) * (2 * C * D) + in_chunk_T, buffer_T)
    outlier_T = outlier_records_ptr + (place_T - S).to(tl.int64) * (2 * C * D) + in_chunk_T
    window_T = window_ptr + ring_T * D
    k_T = tl.where(place_T < S, buffer_T, tl.where(ring_T < 0, outlier_T, window_T))
    v_T = k_T + tl.where(ring_T < 0, C * D, W * D)
    own_T = (ring_T - W).to(tl.int64)
    k_T = tl.where(ring_T < W, k_T, k_ptr + own_T * k_stride_r)
    return k_T, tl.where(ring_T < W, v_T, v_ptr + own_T * v_stride_r)


@triton.jit
def _sparse_attention_kernel(
    q_ptr, k_ptr, v_ptr, records_ptr, slot_ptr, chosen_ptr, outlier_records_ptr, outlier_ptr, window_ptr,
    start_ptr, length_ptr, host_ptr, partial_ptr, peak_ptr, total_ptr, arrived_ptr, o_ptr, scale, chosen_stride_b,
    q_stride_b, q_stride_r, q_stride_h, k_stride_b, k_stride_r, k_stride_k, v_stride_b, v_stride_r, v_stride_k, A, N,
    K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, V: tl.constexpr, SO: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, ZZ: tl.constexpr, M: tl.constexpr,
    MM: tl.constexpr, T: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    PAST: tl.constexpr = SO * C + W
    TILES: tl.constexpr = (PAST + R + T - 1) // T
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, kv_head = head // K, head % K
    m, d = tl.arange(0, M), tl.arange(0, D)
    row_M, group_M = m // G, m % G
    real_MD = (m < R * G)[:, None] & (d < D)[None, :]
    q_M = b * q_stride_b + row_M * q_stride_r + (kv_head * G + group_M) * q_stride_h
    q_MD = tl.load(q_ptr + q_M[:, None] + d[None, :], mask=real_MD, other=0.0).to(FACTOR)
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    peak_M = tl.full((M,), float("-inf"), tl.float32)
    total_M, o_MD = tl.zeros((M,), tl.float32), tl.zeros((M, D), tl.float32)
    for tile in range(split * TILES // Z, (split + 1) * TILES // Z):
        token_T = tile * T + tl.arange(0, T)
        slot_T, chunk_T, exists_T = _existing(
            token_T, slot_ptr + head * S, chosen_ptr + b * chosen_stride_b + kv_head * S,
            outlier_ptr + head * (SO - S), start, length, S, SO, W, R, C,
        )  # fmt: skip
        key_T, value_T = _addresses(
            token_T, slot_T, chunk_T, records_ptr + head * (V * 2 * C * D),
            host_ptr + (b % A * K + kv_head) * N * (2 * C * D), outlier_records_ptr + head * ((SO - S) * 2 * C * D),
            window_ptr + head * (2 * W * D), k_ptr + b * k_stride_b + kv_head * k_stride_k,
            v_ptr + b * v_stride_b + kv_head * v_stride_k, k_stride_r, v_stride_r, S, SO, W, C, D,
        )  # fmt: skip
        k_TD = tl.load(key_T[:, None] + d[None, :], mask=exists_T[:, None], other=0.0).to(FACTOR)
        v_TD = tl.load(value_T[:, None] + d[None, :], mask=exists_T[:, None], other=0.0).to(FACTOR)
        # Row r sees the past, for which token - PAST is negative, and the step's rows up to its own.
        allowed_MT = exists_T[None, :] & (token_T[None, :] - PAST <= row_M[:, None])
        peak_M, total_M, o_MD = absorb(q_MD, k_TD, v_TD, allowed_MT, peak_M, total_M, o_MD, scale)
    at_M = (head * Z + split) * M + m
    tl.store(partial_ptr + at_M[:, None] * D + d[None, :], o_MD, mask=real_MD)
    finish_split(
        peak_M, total_M, partial_ptr, peak_ptr, total_ptr, arrived_ptr, o_ptr, head, split, K, G, R, D, Z, ZZ, M, MM
    )


def sparse_attention(
    q_BRHD: Tensor,
    k_BRKD: Tensor,
    v_BRKD: Tensor,
    places: Places,
    workspace: SparseAttentionWorkspace,
    o_BRHD: Tensor,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attend to the chosen chunks, the outliers, the window and, causally, the step's own rows; fills ``o_BRHD``.

    q, k and v (rotated; any strides with the last dimension contiguous) and the places share one dtype: bf16, fp16
    or fp32. Memory of empty places and unfilled window slots is not read. R * G may be up to 16; C, D and W / C as in
    ``config.py``, C and D powers of two. Raises ``ConfigError`` for other shapes.
    """
    batch, rows, heads, head_dim = q_BRHD.shape
    kv_heads, selected, chunk = k_BRKD.shape[2], places.chosen_BKS.shape[2], places.records_BKVXCD.shape[4]
    _check(q_BRHD, k_BRKD, v_BRKD, places, o_BRHD)
    # Without a host store nothing lies in it, and any valid address will do.
    host = places.records_BKVXCD if places.host_AKNXCD is None else places.host_AKNXCD
    tuning = tuning or (FP32_TUNING if q_BRHD.dtype == torch.float32 else DEFAULT_TUNING)
    splits, merged = workspace.splits, triton.next_power_of_2(rows * heads // kv_heads)
    _sparse_attention_kernel[(batch * kv_heads, splits)](
        q_BRHD, k_BRKD, v_BRKD, *places[:-1], host, workspace.partial_BKZMD, workspace.peak_BKZM, workspace.total_BKZM,
        workspace.arrived_BK, o_BRHD, head_dim**-0.5 * LOG2_E, places.chosen_BKS.stride(0),
        *q_BRHD.stride()[:3], *k_BRKD.stride()[:3], *v_BRKD.stride()[:3],
        host.shape[0], host.shape[2],
        K=kv_heads, G=heads // kv_heads, R=rows, S=selected, V=places.records_BKVXCD.shape[2],
        SO=selected + places.outlier_BKO.shape[2], W=places.window_BKXWD.shape[3], C=chunk, D=head_dim, Z=splits,
        ZZ=min(triton.next_power_of_2(splits), MERGED_ROWS // merged), M=PADDED_ROWS, MM=merged,
        T=tuning.tile_tokens, FACTOR=factor_type(q_BRHD.dtype), num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip
    return o_BRHD


def _check(q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, places: Places, o_BRHD: Tensor) -> None:
    rows, heads, head_dim = q_BRHD.shape[1:]
    chunk, group = places.records_BKVXCD.shape[4], heads // k_BRKD.shape[2]
    require(q_BRHD.dtype in TRITON_TYPES, "dtype", q_BRHD.dtype, "bfloat16, float16, float32")
    require(rows * group <= PADDED_ROWS, "rows * group", rows * group, f"at most {PADDED_ROWS}")
    require(head_dim >= 16 and head_dim & (head_dim - 1) == 0, "head_dim", head_dim, "a power of two from 16 on")
    require(chunk & (chunk - 1) == 0, "chunk", chunk, "a power of two")
    last_dense = all(t.stride(-1) == 1 for t in (q_BRHD, k_BRKD, v_BRKD))
    # The selections of several rows lie side by side, so row 0's is strided.
    others = places._replace(chosen_BKS=places.chosen_BKS[0])
    dense = all(t is None or t.is_contiguous() for t in (*others, o_BRHD))
    require(last_dense and dense, "strides", "strided", "contiguous tensors; q, k, v in the last dimension")
