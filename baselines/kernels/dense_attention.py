"""Decode attention of one or two query rows over all past tokens of every sequence, and the commit of the new token.

Computes what ``attention.step_attention`` does over the first ``length_B`` tokens of a dense cache. The query heads of
a KV head times the rows are the M rows of one matrix product, so every key and value is read once. A head's tokens are
cut into tiles, the tiles into splits of about equal size, one program a split (flash-decoding); lengths are read on the
device, so a ragged batch costs what it holds. The program of a head that finishes last merges the partial results in
an order that the shapes fix. Split 0 also attends to the step's own rows and writes row 0's key and value behind the
past, which no program of the launch reads.

Bytes read: the past's keys and values, once.
Suffixes: A sequences of the home, B sequences, R rows, H query heads, K KV heads, G = H / K, M = R G query rows of a KV
head (padded to 16), D head size, P tokens of capacity, X = K and V, Z splits, T tokens of a tile.
"""

from __future__ import annotations

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
from dualdecoder.kernels.sparse_attention import FP32_TUNING, SparseAttentionWorkspace, Tuning
from dualdecoder.ledger import Ledger

# About eight programs for each of an H200's 132 multiprocessors; more splits of a head than that make its merge dear.
WANTED_PROGRAMS = 1024
MAX_SPLITS = 64
DEFAULT_TUNING = Tuning(tile_tokens=64, num_warps=4, num_stages=3)


class Cache(NamedTuple):
    """Where the past is read, and where the new token is written; contiguous, of one dtype.

    past_BKXPD: keys and values, on the device; tokens from ``length_B`` (int64) on are not read.
    home_AKXPD: sequence b's new token goes to home sequence ``b % A``: ``past_BKXPD`` itself, or page-locked host
        memory, which the kernel writes over the link.
    commit_B: bool, whose row 0 is written. A sequence of P tokens has no place for one.
    """

    past_BKXPD: Tensor
    home_AKXPD: Tensor
    length_B: Tensor
    commit_B: Tensor


def allocate_workspace(
    ledger: Ledger, batch: int, kv_heads: int, head_dim: int, tokens: int, splits: int | None = None
) -> SparseAttentionWorkspace:
    """For up to ``tokens`` past tokens; ``splits`` is chosen from the shapes unless given."""
    splits = splits or wanted_splits(batch * kv_heads, tokens)
    return SparseAttentionWorkspace.allocate(ledger, batch, kv_heads, head_dim, tokens, splits)


def wanted_splits(heads: int, tokens: int) -> int:
    """Splits a head: enough programs to fill the GPU, with a tile each or more."""
    tiles = triton.cdiv(tokens, DEFAULT_TUNING.tile_tokens)
    return max(1, min(triton.cdiv(WANTED_PROGRAMS, heads), MAX_SPLITS, tiles))


@triton.jit
def _commit(home_ptr, k_ptr, v_ptr, capacity, where, D: tl.constexpr):
    """Row 0's key and value to one token's place in the home; pointers are those of the head, home's of the token."""
    d = tl.arange(0, D)
    where_D = (d < D) & where
    tl.store(home_ptr + d, tl.load(k_ptr + d), mask=where_D)
    tl.store(home_ptr + capacity * D + d, tl.load(v_ptr + d), mask=where_D)


@triton.jit
def _dense_attention_kernel(
    q_ptr, k_ptr, v_ptr, past_ptr, home_ptr, length_ptr, commit_ptr, partial_ptr, peak_ptr, total_ptr, arrived_ptr,
    o_ptr, scale, capacity, homes,
    q_stride_b, q_stride_r, q_stride_h, k_stride_b, k_stride_r, k_stride_k, v_stride_b, v_stride_r, v_stride_k,
    K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, ZZ: tl.constexpr,
    M: tl.constexpr, MM: tl.constexpr, T: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, kv_head = head // K, head % K
    m, d = tl.arange(0, M), tl.arange(0, D)
    row_M, group_M = m // G, m % G
    real_MD = (m < R * G)[:, None] & (d < D)[None, :]
    q_M = b * q_stride_b + row_M * q_stride_r + (kv_head * G + group_M) * q_stride_h
    q_MD = tl.load(q_ptr + q_M[:, None] + d[None, :], mask=real_MD, other=0.0).to(FACTOR)
    k_ptr += b * k_stride_b + kv_head * k_stride_k
    v_ptr += b * v_stride_b + kv_head * v_stride_k
    peak_M = tl.full((M,), float("-inf"), tl.float32)
    total_M, o_MD = tl.zeros((M,), tl.float32), tl.zeros((M, D), tl.float32)

    # The step's own rows, as a tile of the smallest size that tl.dot takes.
    own_M = tl.arange(0, M)
    exists_M = (own_M < R) & (split == 0)
    own_k_MD = tl.load(k_ptr + own_M[:, None] * k_stride_r + d[None, :], mask=exists_M[:, None], other=0.0).to(FACTOR)
    own_v_MD = tl.load(v_ptr + own_M[:, None] * v_stride_r + d[None, :], mask=exists_M[:, None], other=0.0).to(FACTOR)
    causal_MM = exists_M[None, :] & (own_M[None, :] <= row_M[:, None])
    peak_M, total_M, o_MD = absorb(q_MD, own_k_MD, own_v_MD, causal_MM, peak_M, total_M, o_MD, scale)

    length = tl.load(length_ptr + b).to(tl.int32)
    tiles = (length + T - 1) // T
    key_ptr = past_ptr + head * capacity * (2 * D)
    value_ptr = key_ptr + capacity * D
    for tile in range(split * tiles // Z, (split + 1) * tiles // Z):
        token_T = tile * T + tl.arange(0, T)
        at_TD, exists_T = token_T[:, None] * D + d[None, :], token_T < length
        k_TD = tl.load(key_ptr + at_TD, mask=exists_T[:, None], other=0.0).to(FACTOR)
        v_TD = tl.load(value_ptr + at_TD, mask=exists_T[:, None], other=0.0).to(FACTOR)
        allowed_MT = exists_T[None, :] & (row_M >= 0)[:, None]
        peak_M, total_M, o_MD = absorb(q_MD, k_TD, v_TD, allowed_MT, peak_M, total_M, o_MD, scale)

    if split == 0:
        home_ptr += ((b % homes * K + kv_head) * capacity * 2 + length) * D
        where = (tl.load(commit_ptr + b) != 0) & (length < capacity)
        _commit(home_ptr, k_ptr, v_ptr, capacity, where, D)
    at_M = (head * Z + split) * M + m
    tl.store(partial_ptr + at_M[:, None] * D + d[None, :], o_MD, mask=real_MD)
    finish_split(
        peak_M, total_M, partial_ptr, peak_ptr, total_ptr, arrived_ptr, o_ptr, head, split, K, G, R, D, Z, ZZ, M, MM
    )


def dense_attention(
    q_BRHD: Tensor,
    k_BRKD: Tensor,
    v_BRKD: Tensor,
    cache: Cache,
    workspace: SparseAttentionWorkspace,
    o_BRHD: Tensor,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attend to the past and, causally, to the step's own rows, then commit row 0; fills and returns ``o_BRHD``.

    q, k and v (rotated; any strides with the last dimension contiguous) and the cache share one dtype: bf16, fp16 or
    fp32. R * G may be up to 16; D is a power of two from 16 on. Raises ``ConfigError`` for anything else.
    """
    batch, rows, heads, head_dim = q_BRHD.shape
    kv_heads = k_BRKD.shape[2]
    _check(q_BRHD, k_BRKD, v_BRKD, cache, o_BRHD)
    tuning = tuning or (FP32_TUNING if q_BRHD.dtype == torch.float32 else DEFAULT_TUNING)
    splits, merged = workspace.splits, triton.next_power_of_2(rows * heads // kv_heads)
    _dense_attention_kernel[(batch * kv_heads, splits)](
        q_BRHD, k_BRKD, v_BRKD, *cache, workspace.partial_BKZMD, workspace.peak_BKZM, workspace.total_BKZM,
        workspace.arrived_BK, o_BRHD, head_dim**-0.5 * LOG2_E, cache.past_BKXPD.shape[3], len(cache.home_AKXPD),
        *q_BRHD.stride()[:3], *k_BRKD.stride()[:3], *v_BRKD.stride()[:3],
        K=kv_heads, G=heads // kv_heads, R=rows, D=head_dim, Z=splits,
        ZZ=min(triton.next_power_of_2(splits), MERGED_ROWS // merged), M=PADDED_ROWS, MM=merged,
        T=tuning.tile_tokens, FACTOR=factor_type(q_BRHD.dtype), num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip
    return o_BRHD


def _check(q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, cache: Cache, o_BRHD: Tensor) -> None:
    rows, heads, head_dim = q_BRHD.shape[1:]
    group = heads // k_BRKD.shape[2]
    require(q_BRHD.dtype in TRITON_TYPES, "dtype", q_BRHD.dtype, "bfloat16, float16, float32")
    require(rows * group <= PADDED_ROWS, "rows * group", rows * group, f"at most {PADDED_ROWS}")
    require(head_dim >= 16 and head_dim & (head_dim - 1) == 0, "head_dim", head_dim, "a power of two from 16 on")
    last_dense = all(t.stride(-1) == 1 for t in (q_BRHD, k_BRKD, v_BRKD))
    dense = all(t.is_contiguous() for t in (*cache, o_BRHD))
    require(last_dense and dense, "strides", "strided", "contiguous tensors; q, k, v in the last dimension")
    home = cache.home_AKXPD
    pinned = q_BRHD.device.type == "cpu" or home.device.type != "cpu" or home.is_pinned()
    require(pinned, "host memory", "pageable", "pinned memory, which a kernel can write")
