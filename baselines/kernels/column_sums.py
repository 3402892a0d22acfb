"""Column sums of a prompt's causal attention probabilities, without ever storing a probability.

Reference: ``baselines.h2o.column_sums``. Two launches. The first gives every query's logsumexp, as attention would but
without values; the second walks, for each tile of keys, all queries from the diagonal down and sums
``exp(logit - logsumexp)``. Together twice the products of a prefill's q.k: at 122,880 tokens, 32 query heads and D 128
1.2e14 operations a layer, and bytes that do not matter.
Suffixes: T tokens, H query heads, K KV heads, G = H / K, D head size, M queries of a tile, N keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.kernels.online_softmax import LOG2_E


@triton.jit
def _tile(ptr, stride_t, first, tokens, ROWS: tl.constexpr, D: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rows ``first`` on of one head, zeros beyond the last token."""
    t, d = (first + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, D)
    tile = tl.load(ptr + t[:, None] * stride_t + d[None, :], mask=(t < tokens)[:, None], other=0.0)
    if INTERPRETED:
        # The interpreter multiplies the bit patterns of bf16.
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _logsumexp_kernel(
    q_ptr, k_ptr, logsumexp_ptr, scale, tokens, q_stride_t, q_stride_h, k_stride_t, k_stride_k, G: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Backwards: the last queries have the most keys.
    first, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1).to(tl.int64)
    m_M = first + tl.arange(0, M)
    q_MD = _tile(q_ptr + head * q_stride_h, q_stride_t, first, tokens, M, D, INTERPRETED)
    k_ptr += head // G * k_stride_k
    peak_M, total_M = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    for begin in range(0, tl.minimum(first + M, tokens), N):
        k_ND = _tile(k_ptr, k_stride_t, begin, tokens, N, D, INTERPRETED)
        logit_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        n_N = begin + tl.arange(0, N)
        logit_MN = tl.where(n_N[None, :] <= m_M[:, None], logit_MN, float("-inf"))
        # Key 0 is in the first tile and allowed to all, so the peak is finite.
        higher_M = tl.maximum(peak_M, tl.max(logit_MN, axis=1))
        total_M = total_M * tl.exp2(peak_M - higher_M) + tl.sum(tl.exp2(logit_MN - higher_M[:, None]), axis=1)
        peak_M = higher_M
    tl.store(logsumexp_ptr + head * tokens + m_M, peak_M + tl.log2(total_M), mask=m_M < tokens)


@triton.jit
def _column_sums_kernel(
    q_ptr, k_ptr, logsumexp_ptr, sums_ptr, scale, tokens, q_stride_t, q_stride_h, k_stride_t, k_stride_k,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    first, kv_head = tl.program_id(0) * N, tl.program_id(1).to(tl.int64)
    n_N = first + tl.arange(0, N)
    k_ND = _tile(k_ptr + kv_head * k_stride_k, k_stride_t, first, tokens, N, D, INTERPRETED)
    sum_N = tl.zeros((N,), tl.float32)
    for g in range(G):
        head = kv_head * G + g
        for begin in range(first // M * M, tokens, M):
            m_M = begin + tl.arange(0, M)
            q_MD = _tile(q_ptr + head * q_stride_h, q_stride_t, begin, tokens, M, D, INTERPRETED)
            logit_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
            logsumexp_M = tl.load(logsumexp_ptr + head * tokens + m_M, mask=m_M < tokens, other=float("inf"))
            allowed_MN = n_N[None, :] <= m_M[:, None]
            sum_N += tl.sum(tl.where(allowed_MN, tl.exp2(logit_MN - logsumexp_M[:, None]), 0.0), axis=0)
    tl.store(sums_ptr + kv_head * tokens + n_N, sum_N, mask=n_N < tokens)


def column_sums(q_THD: Tensor, k_TKD: Tensor) -> Tensor:
    """Probability that each token receives from itself and all later queries of the group, fp32 ``[K, T]``.

    One dtype: bf16, fp16 or fp32; any strides with the last dimension contiguous. Raises ``ConfigError`` for a head
    size without a kernel.
    """
    (tokens, heads, head_dim), kv_heads = q_THD.shape, k_TKD.shape[1]
    require(head_dim >= 16 and head_dim & (head_dim - 1) == 0, "head_dim", head_dim, "a power of two from 16 on")
    require(q_THD.stride(-1) == k_TKD.stride(-1) == 1, "strides", "strided", "contiguous in the last dimension")
    logsumexp_HT, sums_KT = (
        torch.empty((rows, tokens), dtype=torch.float32, device=q_THD.device) for rows in (heads, kv_heads)
    )
    wide = q_THD.dtype == torch.float32
    sizes = {"G": heads // kv_heads, "D": head_dim, "INTERPRETED": triton.knobs.runtime.interpret}
    tiles = {"M": 32, "N": 32, "num_warps": 4} if wide else {"M": 128, "N": 64, "num_warps": 8}
    arguments = (head_dim**-0.5 * LOG2_E, tokens, *q_THD.stride()[:2], *k_TKD.stride()[:2])
    queries, keys = triton.cdiv(tokens, tiles["M"]), triton.cdiv(tokens, tiles["N"])
    _logsumexp_kernel[(queries, heads)](q_THD, k_TKD, logsumexp_HT, *arguments, **sizes, **tiles)
    _column_sums_kernel[(keys, kv_heads)](q_THD, k_TKD, logsumexp_HT, sums_KT, *arguments, **sizes, **tiles)
    return sums_KT
