"""Append one token to the tail; a block that it fills goes to the store, with the bounds of its keys.

Replaces ``ReferenceBlockOps.append``. One program a sequence and KV head. Unlike ``dualdecoder.kernels.commit``, which
lets go of a chunk when the next token needs its place, this one stores a block with its last token: it can be selected
in the same step. The store may be pinned host memory, which the kernel writes over PCIe.
Suffixes: A sequences of the store (fewer than B only where sequences share host memory), B sequences, K KV heads,
N blocks, X = K and V, Y = smallest and largest key, C tokens of a block, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require


@triton.jit
def _whole_block(tail_ptr, newest_D, C: tl.constexpr, D: tl.constexpr):
    """Keys or values of the block, fp32, the newest not from memory: another thread may have written it."""
    c, d = tl.arange(0, C), tl.arange(0, D)
    older_C1 = (c < C - 1)[:, None]
    older_CD = tl.load(tail_ptr + c[:, None] * D + d[None, :], mask=older_C1, other=0.0).to(tl.float32)
    return tl.where(older_C1, older_CD, newest_D.to(tl.float32)[None, :])


@triton.jit
def _append_kernel(
    tail_ptr, records_ptr, bounds_ptr, k_ptr, v_ptr, length_ptr, commit_ptr,
    k_stride_b, k_stride_k, v_stride_b, v_stride_k,
    A: tl.constexpr, K: tl.constexpr, N: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, kv_head = head // K, head % K
    if tl.load(commit_ptr + b):
        length = tl.load(length_ptr + b)
        place, block = length % C, length // C
        c, d = tl.arange(0, C), tl.arange(0, D)
        key_D = tl.load(k_ptr + b * k_stride_b + kv_head * k_stride_k + d)
        value_D = tl.load(v_ptr + b * v_stride_b + kv_head * v_stride_k + d)
        tail_ptr += head * (2 * C * D)
        tl.store(tail_ptr + place * D + d, key_D)
        tl.store(tail_ptr + (C + place) * D + d, value_D)
        if place == C - 1:
            key_CD = _whole_block(tail_ptr, key_D, C, D)
            value_CD = _whole_block(tail_ptr + C * D, value_D, C, D)
            record_ptr = records_ptr + ((b % A * K + kv_head) * N + block) * (2 * C * D)
            at_CD = c[:, None] * D + d[None, :]
            kind = records_ptr.dtype.element_ty
            tl.store(record_ptr + at_CD, key_CD.to(kind))
            tl.store(record_ptr + C * D + at_CD, value_CD.to(kind))
            bounds_ptr += (head * N + block) * (2 * D)
            tl.store(bounds_ptr + d, tl.min(key_CD, axis=0).to(kind))
            tl.store(bounds_ptr + D + d, tl.max(key_CD, axis=0).to(kind))


def append_token(
    tail_BKXCD: Tensor,
    records_AKNXCD: Tensor,
    bounds_BKNYD: Tensor,
    k_BKD: Tensor,
    v_BKD: Tensor,
    length_B: Tensor,
    commit_B: Tensor,
) -> None:
    """In place, for one layer, where ``commit_B`` (bool) holds; all other sequences are left alone.

    ``length_B`` (int64): tokens before this one. ``records`` is pinned, or on the device; sequence b uses row b % A.
    k and v may be views with a contiguous last dimension. All of one dtype; C and D are powers of two.
    Raises ``ConfigError`` for sizes, strides or host memory without a kernel.
    """
    batch, kv_heads, blocks = bounds_BKNYD.shape[:3]
    chunk, head_dim = tail_BKXCD.shape[3:]
    _check(tail_BKXCD, records_AKNXCD, bounds_BKNYD, k_BKD, v_BKD)
    _append_kernel[(batch * kv_heads,)](
        tail_BKXCD, records_AKNXCD, bounds_BKNYD, k_BKD, v_BKD, length_B, commit_B,
        *k_BKD.stride()[:2], *v_BKD.stride()[:2],
        A=len(records_AKNXCD), K=kv_heads, N=blocks, C=chunk, D=head_dim, num_warps=1,
    )  # fmt: skip


def _check(tail_BKXCD: Tensor, records_AKNXCD: Tensor, bounds_BKNYD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> None:
    for name, size in (("block", tail_BKXCD.shape[3]), ("head_dim", tail_BKXCD.shape[4])):
        require(size & (size - 1) == 0, name, size, "a power of two")
    reachable = not tail_BKXCD.is_cuda or records_AKNXCD.is_cuda or records_AKNXCD.is_pinned()
    require(reachable, "records", "pageable memory", "pinned or device memory, which a kernel can write")
    dense = all(t.is_contiguous() for t in (tail_BKXCD, records_AKNXCD, bounds_BKNYD))
    last_dense = k_BKD.stride(-1) == v_BKD.stride(-1) == 1
    require(dense and last_dense, "strides", "strided", "contiguous tensors; k and v in the last dimension")
