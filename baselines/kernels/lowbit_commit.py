"""Commit of one decode step to a low-bit cache: the reference is ``baselines.lowbit.LowBitCache.commit``.

One program a sequence and KV head. It also writes the exact pair to the host, over PCIe, which is 4 D bytes in 16 bits.
A value is read before the new token takes its slot; a group of keys is read after it.
Suffixes: A host sequences, B sequences, K KV heads, D head size, W tokens of a group, P blocks of words, N groups,
T tokens, C groups of E channels, X = K and V, L = scale and zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baselines.lowbit import LowBitCache
from dualdecoder.errors import require

# A complete group is [W, D] numbers in registers.
NUM_WARPS = 4


@triton.jit
def _levels(low, high, BITS: tl.constexpr, KIND: tl.constexpr):
    """Scale and zero of a range, rounded as they are stored."""
    if BITS == 1:
        zero, scale = (3 * low + high) * 0.25, (high - low) * 0.5
    else:
        zero, scale = low, tl.div_rn(high - low, tl.zeros_like(low) + ((1 << BITS) - 1))
    return scale.to(KIND).to(tl.float32), zero.to(KIND).to(tl.float32)


@triton.jit
def _codes(x, scale, zero, BITS: tl.constexpr):
    steps = tl.div_rn(x - zero, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x))
    return tl.minimum(tl.maximum(tl.floor(steps + 0.5), 0.0), (1 << BITS) - 1.0).to(tl.int32)


@triton.jit
def _store_codes(words_ptr, codes, group, BITS: tl.constexpr):
    """Replace one group's codes in the words that hold them."""
    shift = (group % (16 // BITS) * BITS).to(tl.int32)
    others = tl.load(words_ptr).to(tl.int32) & ~(((1 << BITS) - 1) << shift)
    tl.store(words_ptr, (others | (codes << shift)).to(tl.int16))


@triton.jit
def _retire_value(
    value_ptr, words_ptr, levels_ptr, position, tokens, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One exact value to low bits. Pointers are those of the value, of its first word and of the head's levels."""
    c_C1, e_1E = tl.arange(0, D // E)[:, None], tl.arange(0, E)[None, :]
    value_CE = tl.load(value_ptr + c_C1 * E + e_1E).to(tl.float32)
    low_C1, high_C1 = tl.min(value_CE, axis=1, keep_dims=True), tl.max(value_CE, axis=1, keep_dims=True)
    scale_C1, zero_C1 = _levels(low_C1, high_C1, BITS, KIND)
    _store_codes(words_ptr + (c_C1 * E + e_1E) * W, _codes(value_CE, scale_C1, zero_C1, BITS), position // W, BITS)
    tl.store(levels_ptr + c_C1 * tokens + position, scale_C1.to(KIND))
    tl.store(levels_ptr + (D // E + c_C1) * tokens + position, zero_C1.to(KIND))


@triton.jit
def _close_group(
    ring_ptr, words_ptr, levels_ptr, group, W: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr
):
    """The ring's keys to low bits, and back dequantised. Pointers are those of the head's ring, block and levels."""
    d_1D = tl.arange(0, D)[None, :]
    at_WD = tl.arange(0, W)[:, None] * D + d_1D
    key_WD = tl.load(ring_ptr + at_WD).to(tl.float32)
    low_1D, high_1D = tl.min(key_WD, axis=0, keep_dims=True), tl.max(key_WD, axis=0, keep_dims=True)
    scale_1D, zero_1D = _levels(low_1D, high_1D, BITS, KIND)
    codes_WD = _codes(key_WD, scale_1D, zero_1D, BITS)
    _store_codes(words_ptr + at_WD, codes_WD, group, BITS)
    tl.store(levels_ptr + d_1D, scale_1D.to(KIND))
    tl.store(levels_ptr + D + d_1D, zero_1D.to(KIND))
    tl.store(ring_ptr + at_WD, (codes_WD.to(tl.float32) * scale_1D + zero_1D).to(KIND))


@triton.jit
def _commit_kernel(
    ring_ptr, key_codes_ptr, key_levels_ptr, value_codes_ptr, value_levels_ptr, host_ptr, k_ptr, v_ptr, length_ptr,
    commit_ptr, blocks, host_tokens, k_stride_b, k_stride_k, v_stride_b, v_stride_k,
    A: tl.constexpr, K: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    PACK: tl.constexpr = 16 // BITS
    KIND: tl.constexpr = ring_ptr.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    b, kv_head = head // K, head % K
    if tl.load(commit_ptr + b):
        length, d = tl.load(length_ptr + b), tl.arange(0, D)
        slot, tokens = length % W, blocks * (PACK * W)
        ring_ptr += head * (2 * W * D)
        if length >= W:
            block = head * blocks + (length - W) // (PACK * W)
            _retire_value(
                ring_ptr + (W + slot) * D, value_codes_ptr + block * (W * D) + slot,
                value_levels_ptr + head * (2 * (D // E)) * tokens, length - W, tokens, W, D, E, BITS, KIND,
            )  # fmt: skip
        # No thread writes the new token before all have read the value.
        tl.debug_barrier()
        key_D = tl.load(k_ptr + b * k_stride_b + kv_head * k_stride_k + d)
        value_D = tl.load(v_ptr + b * v_stride_b + kv_head * v_stride_k + d)
        tl.store(ring_ptr + slot * D + d, key_D)
        tl.store(ring_ptr + (W + slot) * D + d, value_D)
        record_ptr = host_ptr + ((b % A * K + kv_head) * host_tokens + length) * (2 * D)
        tl.store(record_ptr + d, key_D)
        tl.store(record_ptr + D + d, value_D)
        # Nor reads the group before the new token is in it.
        tl.debug_barrier()
        if slot == W - 1:
            group = length // W
            _close_group(
                ring_ptr, key_codes_ptr + (head * blocks + group // PACK) * (W * D),
                key_levels_ptr + (head * (blocks * PACK) + group) * (2 * D), group, W, D, BITS, KIND,
            )  # fmt: skip


def commit_lowbit(
    cache: LowBitCache, host_AKTXCD: Tensor, k_BKD: Tensor, v_BKD: Tensor, length_B: Tensor, commit_B: Tensor
) -> None:
    """Append one token, in place, to the sequences of ``length_B`` (int64) tokens where ``commit_B`` (bool) holds.

    host_AKTXCD: one record a token (C = 1), pinned when the rest is on the GPU; sequence b uses host sequence b % A.
    k and v may be views with a contiguous last dimension. 1 or 2 bits; W and D are powers of two.
    Raises ``ConfigError`` for other strides, or host memory that a kernel cannot write.
    """
    batch, kv_heads, _, group, head_dim = cache.ring_BKXWD.shape
    pinned = k_BKD.device.type == "cpu" or host_AKTXCD.device.type != "cpu" or host_AKTXCD.is_pinned()
    require(pinned, "host memory", "pageable", "pinned memory, which a kernel can write")
    require(k_BKD.stride(-1) == v_BKD.stride(-1) == 1, "strides", "strided", "k and v dense in the last dimension")
    _commit_kernel[(batch * kv_heads,)](
        cache.ring_BKXWD, cache.key_codes_BKPWD, cache.key_levels_BKNLD, cache.value_codes_BKPDW,
        cache.value_levels_BKLCT, host_AKTXCD, k_BKD, v_BKD, length_B, commit_B, cache.key_codes_BKPWD.shape[2],
        host_AKTXCD.shape[2], *k_BKD.stride()[:2], *v_BKD.stride()[:2], A=len(host_AKTXCD), K=kv_heads, W=group,
        D=head_dim, E=head_dim // cache.value_levels_BKLCT.shape[3], BITS=cache.bits, num_warps=NUM_WARPS,
    )  # fmt: skip
