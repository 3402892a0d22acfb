"""Logits of every chunk for one or two query rows: the one pass over the landmarks of a selection (top.py ends it).

With top.py it replaces ``landmarks.chunk_scores`` and ``top_chunks``. The key of a chunk is the logarithm of its
score: the maximum over the group's heads of ``logit - logsumexp(logits)``; the order is that of the scores. A program
reads a span of landmarks and writes the logits ``[B, K, R, G, row_length(N)]``, -inf for excluded chunks, and one
logsumexp a query head and span; the selection forms the keys in registers, so that keys are never stored.
Logits are fp32: only the products round. In 16 bits they would save a tenth of the bytes, but ties at the cut would
make the search of top.py longer.

Bytes a chunk and KV head at D 128 in 16 bits, R G = 8: landmark 256, logits 32 written and 32 read: 320, or 1.25 times
the landmarks. Expected, not measured, at B 24, K 8, N 16384: 906 MB here, 0.22 ms at 4.2 TB/s. The product, 13 GFLOP
with its columns padded to 16, is nothing to 790 TFLOP/s.
At B 1 a program's first loads (queries, count, exclusions) cost as much as its landmarks: spans are as long as two
programs a multiprocessor allow, so that all run at once, and the exclusions are read in one load.
Suffixes: B sequences, R rows, H query heads, K KV heads, G = H / K, M = R G padded to 16 columns, D head size,
N chunks, O excluded chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.ledger import Ledger

HEAD_SIZES = (16, 32, 64, 128, 256)
MAX_GROUP = 8
# Columns of the product: R G, each row's group padded to a power of two, at least what tl.dot takes.
COLUMNS = 16
# Landmarks of one product (bytes decide: 32 KiB at D 128 in 16 bits) and loads in flight.
TILE_CHUNKS = 128
TILE_CHUNKS_FP32 = 64
STAGES = 3
LOGIT_WARPS = 4
# A program's span of chunks: long spans need fewer partial results, short ones fill the GPU at small batches.
MAX_SPAN = 1024
# Nearly two a multiprocessor, which is what shared memory holds of them: one wave.
WANTED_PROGRAMS = 256
# What Triton recognises as a stride that keeps vectors aligned.
ROW_MULTIPLE = 16
# Below any logit, and finite: a difference of two is 0, not NaN.
LOWEST = tl.constexpr(-1e30)
# Logarithm of an empty sum: far below any logsumexp once ``LOWEST`` is added, and no division by zero on the way.
TINY = tl.constexpr(1e-38)


def span_chunks(batch: int, kv_heads: int, chunks: int) -> int:
    """Chunks of one program: ``TILE_CHUNKS`` times a power of two, at most ``MAX_SPAN``."""
    span = MAX_SPAN
    while span > TILE_CHUNKS and batch * kv_heads * triton.cdiv(chunks, span) < WANTED_PROGRAMS:
        span //= 2
    return span


def row_length(chunks: int) -> int:
    """Logits of a query head, padded so that both kernels move them in vectors of four."""
    return triton.cdiv(chunks, ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True)
class ScoreWorkspace:
    """Logits and the spans' logsumexps, flat. One workspace serves all layers, but not two launches at a time."""

    logits: Tensor
    logsumexps: Tensor
    span: int

    @classmethod
    def allocate(
        cls, ledger: Ledger, batch: int, rows: int, query_heads: int, kv_heads: int, chunks: int, span: int = 0
    ) -> ScoreWorkspace:
        """For launches of at most these sizes, booked under ``workspace``. ``span`` 0: ``span_chunks`` decides."""
        span = span or span_chunks(batch, kv_heads, chunks)
        ok = span % TILE_CHUNKS == 0 and span <= MAX_SPAN
        require(ok, "span", span, f"a multiple of {TILE_CHUNKS}, at most {MAX_SPAN} chunks")
        columns = batch * rows * query_heads
        logits = ledger.on_device("workspace", (columns * row_length(chunks),), torch.float32)
        logsumexps = ledger.on_device("workspace", (columns * triton.cdiv(chunks, span),), torch.float32)
        return cls(logits, logsumexps, span)


@triton.jit
def _excluded_bits(excluded_ptr, begin, EXCLUDED: tl.constexpr, OP: tl.constexpr, TILE: tl.constexpr,
                   SPAN: tl.constexpr):  # fmt: skip
    """Bit t of entry i: chunk ``begin + t * TILE + i`` is excluded. Once a program, not once a tile."""
    o, i = tl.arange(0, OP), tl.arange(0, TILE)
    offset_O = tl.load(excluded_ptr + o, mask=o < EXCLUDED, other=-1).to(tl.int32) - begin
    inside_O = (o < EXCLUDED) & (offset_O >= 0) & (offset_O < SPAN)
    offset_O = tl.where(inside_O, offset_O, 0)
    bit_O = tl.where(inside_O, 1 << (offset_O // TILE), 0)
    # Excluded chunks are distinct: the sum is a union.
    return tl.sum(tl.where((offset_O % TILE)[:, None] == i[None, :], bit_O[:, None], 0), axis=0)


@triton.jit
def _query_columns(q_ptr, stride_r, stride_h, kv_head, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
                   GP: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """The queries of a KV head as columns ``[D, M]``: row after row, each group padded to ``GP`` with zeros."""
    m, d = tl.arange(0, COLUMNS), tl.arange(0, D)
    row_M, group_M = m // GP, m % GP
    q_M = row_M * stride_r + (kv_head * G + group_M) * stride_h
    real_M = (row_M < R) & (group_M < G)
    return tl.trans(tl.load(q_ptr + q_M[:, None] + d[None, :], mask=real_M[:, None], other=0.0))


@triton.jit
def _logits_kernel(
    q_ptr, landmarks_ptr, chunks_ptr, excluded_ptr, logits_ptr, logsumexps_ptr, stride_b, stride_r, stride_h, scale, N,
    length, spans, EXCLUDED: tl.constexpr, OP: tl.constexpr, K: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, GP: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, kv_head = head // K, head % K
    begin = span * SPAN
    end = tl.minimum(tl.minimum(tl.load(chunks_ptr + b).to(tl.int32), N), begin + SPAN)
    q_DM = _query_columns(q_ptr + b * stride_b, stride_r, stride_h, kv_head, G, R, D, GP, COLUMNS)
    if INTERPRETED:
        # The interpreter multiplies the bit patterns of bf16.
        q_DM = q_DM.to(tl.float32)
    bits_N = _excluded_bits(excluded_ptr + head * EXCLUDED, begin, EXCLUDED, OP, TILE, SPAN)
    i, m, d = tl.arange(0, TILE), tl.arange(0, COLUMNS), tl.arange(0, D)
    row_M, group_M = m // GP, m % GP
    real_M = (row_M < R) & (group_M < G)
    head_M = (head * R + row_M) * G + group_M
    landmarks_ptr += head * N * D
    # Each place of the tile has its own running sum: threads meet once, after the loop.
    peak_NM = tl.full((TILE, COLUMNS), LOWEST, tl.float32)
    total_NM = tl.zeros((TILE, COLUMNS), tl.float32)
    for tile in tl.range(0, tl.cdiv(tl.maximum(end - begin, 0), TILE), num_stages=STAGES):
        n = begin + tile * TILE + i
        exists_N = n < end
        # The stream of landmarks must not drive the logits out of L2.
        at_ND = landmarks_ptr + n[:, None] * D + d[None, :]
        landmark_ND = tl.load(at_ND, mask=exists_N[:, None], other=0.0, eviction_policy="evict_first")
        if INTERPRETED:
            landmark_ND = landmark_ND.to(tl.float32)
        logit_NM = tl.dot(landmark_ND, q_DM, input_precision="ieee") * scale
        allowed_N = exists_N & (((bits_N >> tile) & 1) == 0)
        logit_NM = tl.where(allowed_N[:, None], logit_NM, float("-inf"))
        # A mask by the number of chunks would cost the vectors of four.
        at_NM = logits_ptr + head_M[None, :] * length + n[:, None]
        tl.store(at_NM, logit_NM, mask=(n < length)[:, None] & real_M[None, :])
        higher_NM = tl.maximum(peak_NM, logit_NM)
        total_NM = total_NM * tl.exp(peak_NM - higher_NM) + tl.exp(logit_NM - higher_NM)
        peak_NM = higher_NM
    peak_M = tl.max(peak_NM, axis=0)
    total_M = tl.sum(total_NM * tl.exp(peak_NM - peak_M[None, :]), axis=0)
    logsumexp_M = peak_M + tl.log(tl.maximum(total_M, TINY))
    tl.store(logsumexps_ptr + head_M * spans + span, logsumexp_M, mask=real_M)


def score_chunks(
    q_BRHD: Tensor, landmarks_BKND: Tensor, chunks_B: Tensor, excluded_BKO: Tensor, workspace: ScoreWorkspace
) -> None:
    """Write the logits of the chunks that exist, and their logsumexps, to the workspace for ``top.select_top``.

    q_BRHD, landmarks_BKND: the same of bf16, fp16, fp32; q may be a view with any strides but the last. chunks_B
    (int64): chunks that exist. excluded_BKO (int64): distinct chunk numbers that take no part, below 0 for none; O may
    be 0. All but q contiguous.
    Raises ``ConfigError`` for shapes, a head size or a group without a kernel, and a workspace that is too small.
    """
    _check(q_BRHD, landmarks_BKND, chunks_B, excluded_BKO, workspace)
    (R, H, D), (K, N), excluded = q_BRHD.shape[1:], landmarks_BKND.shape[1:3], excluded_BKO.shape[2]
    G, spans = H // K, triton.cdiv(N, workspace.span)
    tile = TILE_CHUNKS_FP32 if q_BRHD.dtype == torch.float32 else TILE_CHUNKS
    _logits_kernel[(spans, q_BRHD.shape[0] * K)](
        q_BRHD, landmarks_BKND, chunks_B, excluded_BKO, workspace.logits, workspace.logsumexps, *q_BRHD.stride()[:3],
        D**-0.5, N, row_length(N), spans, excluded, triton.next_power_of_2(max(excluded, 1)), K, G, R, D,
        triton.next_power_of_2(G), COLUMNS, tile, workspace.span, STAGES, triton.knobs.runtime.interpret,
        num_warps=LOGIT_WARPS,
    )  # fmt: skip


def _check(
    q_BRHD: Tensor, landmarks_BKND: Tensor, chunks_B: Tensor, excluded_BKO: Tensor, workspace: ScoreWorkspace
) -> None:
    (B, R, H, D), (K, N) = q_BRHD.shape, landmarks_BKND.shape[1:3]
    require(R in (1, 2), "rows", R, "1, 2")
    require(D in HEAD_SIZES, "head_dim", D, ", ".join(map(str, HEAD_SIZES)))
    require(H % K == 0 and H // K <= MAX_GROUP, "query_heads", H, f"1 to {MAX_GROUP} times {K}")
    require(landmarks_BKND.dtype == q_BRHD.dtype, "landmarks.dtype", landmarks_BKND.dtype, str(q_BRHD.dtype))
    require(q_BRHD.stride(3) == 1, "q.stride", q_BRHD.stride(), "1 in the last dimension")
    shapes = {
        "landmarks": (landmarks_BKND, (B, K, N, D)),
        "chunks": (chunks_B, (B,)),
        "excluded": (excluded_BKO, (B, K, excluded_BKO.shape[-1])),
    }
    for name, (tensor, shape) in shapes.items():
        fits = tensor.shape == shape and tensor.is_contiguous()
        require(fits, name, tuple(tensor.shape), f"a contiguous tensor of shape {shape}")
    columns, spans = B * R * H, triton.cdiv(N, workspace.span)
    logits = columns * row_length(N)
    enough = workspace.logits.numel() >= logits and workspace.logsumexps.numel() >= columns * spans
    require(enough, "workspace", workspace.logits.numel(), f"at least {logits} logits and {spans} spans")
