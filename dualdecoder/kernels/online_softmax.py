"""The online softmax that all split-KV attention kernels share: one tile's step, and the end of a split.

Suffixes: K KV heads, G query heads of one, R rows, M = R G query rows of a KV head, padded (stored in STORED rows,
merged in MM), T tokens of a tile, D head size, Z splits, ZZ of them merged at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# What tl.dot takes at least; rows * group may not exceed it.
PADDED_ROWS = 16
# Partial rows that the merge holds in registers: 64 of 128 fp32 numbers are 64 registers of each of 128 threads.
MERGED_ROWS = 64
LOG2_E = 1.4426950408889634
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def absorb(q_MD, k_TD, v_TD, allowed_MT, peak_M, total_M, o_MD, scale):
    """One step of the online softmax (base 2). A row that has seen no token yet has peak -inf."""
    score_MT = tl.dot(q_MD, tl.trans(k_TD), input_precision="ieee") * scale
    score_MT = tl.where(allowed_MT, score_MT, float("-inf"))
    higher_M = tl.maximum(peak_M, tl.max(score_MT, axis=1))
    # Without the zero, -inf - -inf would make NaN of a row with no token so far.
    reference_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
    weight_MT = tl.exp2(score_MT - reference_M[:, None])
    shrink_M = tl.exp2(peak_M - reference_M)
    o_MD = tl.dot(weight_MT.to(v_TD.dtype), v_TD, o_MD * shrink_M[:, None], input_precision="ieee")
    return higher_M, total_M * shrink_M + tl.sum(weight_MT, axis=1), o_MD


@triton.jit
def merge(
    partial_ptr, peak_ptr, total_ptr, rows, M: tl.constexpr, MM: tl.constexpr, D: tl.constexpr, Z: tl.constexpr,
    ZZ: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a head in order, ZZ at once: all their reads wait for the L2 cache together.

    Only ``rows`` of the M rows are real; with less padding they are MM, whose numbers and outputs are returned. Reads
    bypass the L1 cache, for the partial results were written by other multiprocessors.
    """
    m, d = tl.arange(0, MM), tl.arange(0, D)
    peak_M, total_M = tl.full((MM,), float("-inf"), tl.float32), tl.zeros((MM,), tl.float32)
    o_MD = tl.zeros((MM, D), tl.float32)
    for first in range(0, Z, ZZ):
        z = first + tl.arange(0, ZZ)
        real_ZM, at_ZM = (z < Z)[:, None] & (m < rows)[None, :], z[:, None] * M + m[None, :]
        part_ptr = partial_ptr + at_ZM[:, :, None] * D + d[None, None, :]
        part_ZMD = tl.load(part_ptr, mask=real_ZM[:, :, None], other=0.0, cache_modifier=".cg")
        peak_ZM = tl.load(peak_ptr + at_ZM, mask=real_ZM, other=float("-inf"), cache_modifier=".cg")
        total_ZM = tl.load(total_ptr + at_ZM, mask=real_ZM, other=0.0, cache_modifier=".cg")
        higher_M = tl.maximum(peak_M, tl.max(peak_ZM, axis=0))
        reference_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        weight_ZM, shrink_M = tl.exp2(peak_ZM - reference_M[None, :]), tl.exp2(peak_M - reference_M)
        total_M = total_M * shrink_M + tl.sum(total_ZM * weight_ZM, axis=0)
        o_MD = o_MD * shrink_M[:, None] + tl.sum(part_ZMD * weight_ZM[:, :, None], axis=0)
        peak_M = higher_M
    # Padding has no tokens at all.
    return m, o_MD / tl.where(m < rows, total_M, 1.0)[:, None]


@triton.jit
def finish_split(
    peak_M, total_M, partial_ptr, peak_ptr, total_ptr, arrived_ptr, o_ptr, head, split, K: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, ZZ: tl.constexpr, STORED: tl.constexpr,
    MM: tl.constexpr,
):  # fmt: skip
    """Store what else a split has found; the last one of a head merges all into ``o_BRHD``.

    The split's part of the output is stored already, in rows of ``STORED``; ``merge`` says what ZZ and MM are.
    """
    m, d = tl.arange(0, peak_M.shape[0]), tl.arange(0, D)
    at_M, real_M = (head * Z + split) * STORED + m, m < R * G
    tl.store(peak_ptr + at_M, peak_M, mask=real_M)
    tl.store(total_ptr + at_M, total_M, mask=real_M)
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel") == Z - 1:
        tl.store(arrived_ptr + head, 0)
        parts = head * (Z * STORED)
        merged_M, result_MD = merge(
            partial_ptr + parts * D, peak_ptr + parts, total_ptr + parts, R * G, STORED, MM, D, Z, ZZ
        )
        o_M = ((head // K * R + merged_M // G) * (K * G) + head % K * G + merged_M % G) * D
        result_MD = result_MD.to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + o_M[:, None] + d[None, :], result_MD, mask=(merged_M < R * G)[:, None])


def factor_type(dtype: torch.dtype) -> tl.dtype:
    """In which type a kernel multiplies numbers of this one."""
    # The interpreter's dot would multiply the bit patterns of bf16.
    return tl.float32 if triton.knobs.runtime.interpret and dtype == torch.bfloat16 else TRITON_TYPES[dtype]
