"""Scores of all blocks from the bounds of their keys: one pass over the bounds for one or two query rows.

Replaces ``summaries.bound_scores``. The bound is one product of twice the head size: smallest and largest key lie side
by side, and so do the negative and the positive part of the query. The bounds of the group's heads are added in
registers: nothing of the size of all query heads is written.
Bytes a block and KV head at D 128 in 16 bits: bounds 512, scores 4 a row. At 122K tokens, K 8: 31 MB a sequence.
Suffixes: B sequences, R rows, H query heads, K KV heads, G = H / K, M = R G padded to 16 columns, D head size,
E = 2 D, N blocks, Y = smallest and largest key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.kernels.scores import row_length

HEAD_SIZES = (16, 32, 64, 128)
# Columns of the product: what tl.dot takes at least, so R G at most.
COLUMNS = 16
# 32 KiB of bounds a product at D 128; three of them in flight in each of two programs a multiprocessor.
TILE_BLOCKS, TILE_BLOCKS_FP32 = 64, 32
STAGES = 3
MAX_SPAN = 1024
# Nearly two programs a multiprocessor of an H200.
WANTED_PROGRAMS = 256


def span_blocks(heads: int, blocks: int, tile: int) -> int:
    """Blocks of one program: tiles times a power of two, short where there are few heads (B K)."""
    span = MAX_SPAN
    while span > tile and heads * triton.cdiv(blocks, span) < WANTED_PROGRAMS:
        span //= 2
    return span


@triton.jit
def _query_parts(q_ptr, stride_r, stride_h, kv_head, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Negative, then positive parts of a KV head's queries as columns ``[E, M]``, fp32; zeros in the padding."""
    m, e = tl.arange(0, COLUMNS), tl.arange(0, 2 * D)
    q_M = (m // G) * stride_r + (kv_head * G + m % G) * stride_h
    q_ME = tl.load(q_ptr + q_M[:, None] + (e % D)[None, :], mask=(m < R * G)[:, None], other=0.0).to(tl.float32)
    return tl.trans(tl.where((e < D)[None, :], tl.minimum(q_ME, 0.0), tl.maximum(q_ME, 0.0)))


@triton.jit
def _bounds_kernel(
    q_ptr, bounds_ptr, blocks_ptr, scores_ptr, stride_b, stride_r, stride_h, N, length,
    K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    b, kv_head = head // K, head % K
    begin = tl.program_id(0) * SPAN
    end = tl.minimum(tl.minimum(tl.load(blocks_ptr + b).to(tl.int32), N), begin + SPAN)
    q_EM = _query_parts(q_ptr + b * stride_b, stride_r, stride_h, kv_head, G, R, D, COLUMNS)
    if not INTERPRETED:
        # The interpreter multiplies the bit patterns of bf16.
        q_EM = q_EM.to(bounds_ptr.dtype.element_ty)
    i, m, e = tl.arange(0, TILE), tl.arange(0, COLUMNS), tl.arange(0, 2 * D)
    bounds_ptr += head * N * (2 * D)
    for tile in tl.range(0, tl.cdiv(tl.maximum(end - begin, 0), TILE), num_stages=STAGES):
        n = begin + tile * TILE + i
        bound_NE = tl.load(bounds_ptr + n.to(tl.int64)[:, None] * (2 * D) + e[None, :], mask=(n < end)[:, None],
                           other=0.0)  # fmt: skip
        if INTERPRETED:
            bound_NE = bound_NE.to(tl.float32)
        bound_NM = tl.dot(bound_NE, q_EM, input_precision="ieee")
        for r in tl.static_range(R):
            of_row_M = (m >= r * G) & (m < (r + 1) * G)
            score_N = tl.sum(tl.where(of_row_M[None, :], bound_NM, 0.0), axis=1)
            tl.store(scores_ptr + (head * R + r) * length + n, score_N, mask=n < end)


def score_bounds(q_BRHD: Tensor, bounds_BKNYD: Tensor, blocks_B: Tensor, scores_BKRN: Tensor) -> None:
    """Write the scores of the blocks that exist, the first ``blocks_B`` (int64); what lies behind them is left alone.

    q, bounds: the same of bf16, fp16, fp32; q may be a view with any strides but the last. scores (fp32): contiguous,
    the last dimension ``row_length(N)``, the layout in which ``top.select_top`` reads logits of groups of one.
    Raises ``ConfigError`` for shapes without a kernel.
    """
    (B, R, H, D), (K, N) = q_BRHD.shape, bounds_BKNYD.shape[1:3]
    _check(q_BRHD, bounds_BKNYD, blocks_B, scores_BKRN)
    tile = TILE_BLOCKS_FP32 if q_BRHD.dtype == torch.float32 else TILE_BLOCKS
    span = span_blocks(B * K, N, tile)
    _bounds_kernel[(triton.cdiv(N, span), B * K)](
        q_BRHD, bounds_BKNYD, blocks_B, scores_BKRN, *q_BRHD.stride()[:3], N, scores_BKRN.shape[3],
        K, H // K, R, D, COLUMNS, tile, span, STAGES, triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip


def _check(q_BRHD: Tensor, bounds_BKNYD: Tensor, blocks_B: Tensor, scores_BKRN: Tensor) -> None:
    (B, R, H, D), (K, N) = q_BRHD.shape, bounds_BKNYD.shape[1:3]
    require(D in HEAD_SIZES, "head_dim", D, ", ".join(map(str, HEAD_SIZES)))
    fits = H % K == 0 and R * H // K <= COLUMNS
    require(fits, "query_heads", H, f"a multiple of {K} with rows * group of at most {COLUMNS}")
    require(bounds_BKNYD.dtype == q_BRHD.dtype, "bounds.dtype", bounds_BKNYD.dtype, str(q_BRHD.dtype))
    require(q_BRHD.stride(3) == 1, "q.stride", q_BRHD.stride(), "1 in the last dimension")
    shapes = {
        "bounds": (bounds_BKNYD, (B, K, N, 2, D)),
        "blocks": (blocks_B, (B,)),
        "scores": (scores_BKRN, (B, K, R, row_length(N))),
    }
    for name, (tensor, shape) in shapes.items():
        fits = tensor.shape == shape and tensor.is_contiguous()
        require(fits, name, tuple(tensor.shape), f"a contiguous tensor of shape {shape}")
