"""Commit of one decode step: the oldest chunk of a full window to the host, then row 0's key and value to the window.

Replaces ``DualDecoder._commit``. One program a sequence and KV head. The host store is pinned memory that the kernel
writes over PCIe directly: one record (K then V, contiguous) a flush; a program that has nothing to flush reads and
writes one token only. The new token may take a slot of the chunk that leaves, so the chunk is read first.
Suffixes: A host sequences (fewer than B only where sequences share their host memory), B sequences, K KV heads, D head
size, C tokens of a chunk, W tokens of the window, N chunks, X = K and V.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require


@triton.jit
def _flush(window_ptr, host_ptr, landmark_ptr, start, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Pointers are those of the head, of its record and of its landmark. A chunk never wraps around the ring."""
    slot_C1 = ((start % W) + tl.arange(0, C))[:, None]
    c_C1, d_1D = tl.arange(0, C)[:, None], tl.arange(0, D)[None, :]
    key_CD = tl.load(window_ptr + slot_C1 * D + d_1D)
    value_CD = tl.load(window_ptr + (W + slot_C1) * D + d_1D)
    tl.store(host_ptr + c_C1 * D + d_1D, key_CD)
    tl.store(host_ptr + (C + c_C1) * D + d_1D, value_CD)
    mean_D = tl.sum(key_CD.to(tl.float32), axis=0) / C
    tl.store(landmark_ptr + tl.arange(0, D), mean_D.to(landmark_ptr.dtype.element_ty))


@triton.jit
def _commit_kernel(
    window_ptr, host_ptr, landmark_ptr, k_ptr, v_ptr, start_ptr, length_ptr, flush_ptr, commit_ptr,
    k_stride_b, k_stride_k, v_stride_b, v_stride_k,
    A: tl.constexpr, K: tl.constexpr, N: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    FLUSHES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, kv_head = head // K, head % K
    window_ptr += head * (2 * W * D)
    if FLUSHES:
        if tl.load(flush_ptr + b):
            start = tl.load(start_ptr + b)
            record = ((b % A * K + kv_head) * N + start // C) * (2 * C * D)
            _flush(window_ptr, host_ptr + record, landmark_ptr + (head * N + start // C) * D, start, W, C, D)
        # No thread writes the new token before all have read the chunk.
        tl.debug_barrier()
    if tl.load(commit_ptr + b):
        d = tl.arange(0, D)
        slot = tl.load(length_ptr + b) % W
        tl.store(window_ptr + slot * D + d, tl.load(k_ptr + b * k_stride_b + kv_head * k_stride_k + d))
        tl.store(window_ptr + (W + slot) * D + d, tl.load(v_ptr + b * v_stride_b + kv_head * v_stride_k + d))


def commit_step(
    window_BKXWD: Tensor,
    host_AKNXCD: Tensor,
    landmarks_BKND: Tensor,
    k_BKD: Tensor,
    v_BKD: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    flush_B: Tensor,
    commit_B: Tensor,
    num_warps: int = 1,
) -> None:
    """Flush and append, in place, for one layer.

    Where ``flush_B`` (bool): positions ``start_B .. start_B + C`` of the window go to host record ``start_B // C``,
    their mean key (in the data dtype) to that landmark. Then where ``commit_B`` (bool): row 0's key and value go to
    window slot ``length_B % W``. All other sequences are left alone. ``start_B`` (a multiple of C below ``N * C``) and
    ``length_B`` are int64. ``host_AKNXCD`` is pinned when the rest is on the GPU; sequence b uses host sequence b % A.
    ``k_BKD`` and ``v_BKD`` may be views with a contiguous last dimension. C and D are powers of two.
    Raises ``ConfigError`` for sizes, strides or host memory without a kernel.
    """
    batch, kv_heads, _, tokens, head_dim = window_BKXWD.shape
    chunk = host_AKNXCD.shape[4]
    _check(window_BKXWD, k_BKD, v_BKD)
    _check_flush(window_BKXWD, host_AKNXCD, landmarks_BKND)
    _commit_kernel[(batch * kv_heads,)](
        window_BKXWD, host_AKNXCD, landmarks_BKND, k_BKD, v_BKD, start_B, length_B, flush_B, commit_B,
        *k_BKD.stride()[:2], *v_BKD.stride()[:2], A=len(host_AKNXCD),
        K=kv_heads, N=landmarks_BKND.shape[2], W=tokens, C=chunk, D=head_dim, FLUSHES=True, num_warps=num_warps,
    )  # fmt: skip


def append_token(window_BKXWD: Tensor, k_BKD: Tensor, v_BKD: Tensor, length_B: Tensor, commit_B: Tensor) -> None:
    """Only the second half of ``commit_step``: write row 0 where ``commit_B``; nothing leaves the window."""
    batch, kv_heads, _, tokens, head_dim = window_BKXWD.shape
    _check(window_BKXWD, k_BKD, v_BKD)
    # A pointer that is not used may be any valid one.
    _commit_kernel[(batch * kv_heads,)](
        window_BKXWD, window_BKXWD, window_BKXWD, k_BKD, v_BKD, length_B, length_B, commit_B, commit_B,
        *k_BKD.stride()[:2], *v_BKD.stride()[:2], A=1,
        K=kv_heads, N=1, W=tokens, C=1, D=head_dim, FLUSHES=False, num_warps=1,
    )  # fmt: skip


def _check_flush(window_BKXWD: Tensor, host_AKNXCD: Tensor, landmarks_BKND: Tensor) -> None:
    chunk = host_AKNXCD.shape[4]
    require(chunk & (chunk - 1) == 0, "chunk", chunk, "a power of two")
    pinned = window_BKXWD.device.type == "cpu" or host_AKNXCD.device.type != "cpu" or host_AKNXCD.is_pinned()
    require(pinned, "host memory", "pageable", "pinned memory, which a kernel can write")
    dense = landmarks_BKND.is_contiguous() and host_AKNXCD.is_contiguous()
    require(dense, "strides", "strided", "contiguous landmarks and host records")


def _check(window_BKXWD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> None:
    head_dim = window_BKXWD.shape[4]
    require(head_dim & (head_dim - 1) == 0, "head_dim", head_dim, "a power of two")
    dense = window_BKXWD.is_contiguous() and k_BKD.stride(-1) == v_BKD.stride(-1) == 1
    require(dense, "strides", "strided", "a contiguous window; k and v contiguous in the last dimension")
