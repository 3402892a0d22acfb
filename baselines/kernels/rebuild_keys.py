"""Keys of the listed chunks from their low-rank factors, rotated, straight into their slots of a chunk buffer.

The same as ``LowRankKeys.rebuilt`` for the entries of a list (``dualdecoder.kernels.fetch_list``): gather, product,
rotation and scatter in one launch. A fixed number of programs walks the list in tiles of some chunks. All chunks of a
product need the same right factor, that of their sequence and KV head. ``assign_slots`` lists the chunks of a head
together, so a tile has one head or two: the program takes one product a head, over the whole tile, and stores that
head's rows. Any other order is right too, only slower.

Bytes at D 128, rank 160, 16 bits, C 8, a chunk and KV head: 2,560 of the left factor read, 2,048 of keys written. A
tile reads a right factor (40 KiB) and its cosines and sines (256 a token) from L2. B 16, K 8, 102 misses a head: 60 MB,
4.3 GFLOP; 0.015 ms at 4.1 TB/s at the least, beside 0.53 ms that the values take on the link.
Suffixes: B sequences, K KV heads, N chunks, C tokens of a chunk, M = tokens of a tile, U rank, D head size,
P = D / 2 pairs, Z slots, X = K and V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baselines.low_rank import LowRankKeys
from dualdecoder.errors import require
from dualdecoder.kernels.fetch_list import FetchList

# What tl.dot takes at least.
SMALLEST = 16
TILE_TOKENS = 64
RANK_BLOCK = 32
NUM_WARPS = 4
# Without matrix units the products are multiply-adds, which spill registers in large tiles.
TILE_TOKENS_FP32 = 32
NUM_WARPS_FP32 = 8
# Two for each of an H200's multiprocessors.
PROGRAMS = 264
NO_HEAD = tl.constexpr(2**31 - 1)


@triton.jit
def _product(
    left_ptr, right_ptr, row_M, mine_M, U: tl.constexpr, D: tl.constexpr, PP: tl.constexpr, BLOCK_U: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Both halves of the keys of those rows of the left factor where ``mine_M``; ``right_ptr`` is that of the head."""
    u, p_1P = tl.arange(0, BLOCK_U), tl.arange(0, PP)[None, :]
    first_MP = tl.zeros((row_M.shape[0], PP), tl.float32)
    second_MP = tl.zeros((row_M.shape[0], PP), tl.float32)
    for begin in range(0, U, BLOCK_U):
        real_U = begin + u < U
        left_MU = tl.load(
            left_ptr + row_M[:, None] * U + (begin + u)[None, :], mask=mine_M[:, None] & real_U[None, :], other=0.0
        )
        right_UP = right_ptr + (begin + u)[:, None] * D + p_1P
        real_UP = real_U[:, None] & (p_1P < D // 2)
        first_UP = tl.load(right_UP, mask=real_UP, other=0.0)
        second_UP = tl.load(right_UP + D // 2, mask=real_UP, other=0.0)
        if INTERPRETED:
            # The interpreter multiplies the bit patterns of bf16.
            left_MU, first_UP = left_MU.to(tl.float32), first_UP.to(tl.float32)
            second_UP = second_UP.to(tl.float32)
        first_MP = tl.dot(left_MU, first_UP, first_MP, input_precision="ieee")
        second_MP = tl.dot(left_MU, second_UP, second_MP, input_precision="ieee")
    return first_MP, second_MP


@triton.jit
def _rebuild_kernel(
    left_ptr, right_ptr, table_ptr, records_ptr, entries_ptr, count_ptr, capacity, heads, chunks, slots,
    U: tl.constexpr, C: tl.constexpr, D: tl.constexpr, PP: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_U: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    count = tl.load(count_ptr)
    m, p = tl.arange(0, CHUNKS * C), tl.arange(0, PP)
    token_M, real_1P = m % C, (p < D // 2)[None, :]
    for begin in range(tl.program_id(0) * CHUNKS, count, tl.num_programs(0) * CHUNKS):
        entry_M = begin + m // C
        listed_M = entry_M < count
        head_M = tl.load(entries_ptr + entry_M, mask=listed_M, other=NO_HEAD)
        chunk_M = tl.load(entries_ptr + capacity + entry_M, mask=listed_M, other=0)
        slot_M = tl.load(entries_ptr + 2 * capacity + entry_M, mask=listed_M, other=0)
        turn_MP = table_ptr + (chunk_M * C + token_M)[:, None] * D + p[None, :]
        turned_MP = listed_M[:, None] & real_1P
        cos_MP = tl.load(turn_MP, mask=turned_MP, other=0.0).to(tl.float32)
        sin_MP = tl.load(turn_MP + D // 2, mask=turned_MP, other=0.0).to(tl.float32)
        head = tl.min(head_M, axis=0)
        while head < NO_HEAD:
            mine_M, wide = head_M == head, head.to(tl.int64)
            row_M = ((wide // heads) * chunks + chunk_M) * C + token_M
            first_MP, second_MP = _product(
                left_ptr, right_ptr + wide * (U * D), row_M, mine_M, U, D, PP, BLOCK_U, INTERPRETED
            )
            at_MP = records_ptr + ((wide * slots + slot_M) * (2 * C) + token_M)[:, None] * D + p[None, :]
            stored_MP = mine_M[:, None] & real_1P
            key_MP = first_MP * cos_MP - second_MP * sin_MP
            tl.store(at_MP, key_MP.to(records_ptr.dtype.element_ty), mask=stored_MP)
            key_MP = second_MP * cos_MP + first_MP * sin_MP
            tl.store(at_MP + D // 2, key_MP.to(records_ptr.dtype.element_ty), mask=stored_MP)
            head = tl.min(tl.where(head_M > head, head_M, NO_HEAD), axis=0)


def rebuild_keys(keys: LowRankKeys, fetch: FetchList, records_BKZXCD: Tensor, *, programs: int = PROGRAMS) -> None:
    """Write the keys of the listed chunks into the first halves of their slots; nothing else is touched.

    Factors and records share one dtype: bf16, fp16 or fp32; all contiguous. Products are summed in fp32, rotated in
    fp32, rounded once. C is a power of two, D even, any rank.
    Raises ``ConfigError`` for other chunk sizes, strides or dtypes.
    """
    _check(keys, records_BKZXCD)
    chunks, chunk, rank = keys.left_BNCU.shape[1:]
    wide = records_BKZXCD.dtype == torch.float32
    tile, num_warps = (TILE_TOKENS_FP32, NUM_WARPS_FP32) if wide else (TILE_TOKENS, NUM_WARPS)
    kv_heads, slots, head_dim = keys.right_BKUD.shape[1], records_BKZXCD.shape[2], keys.right_BKUD.shape[3]
    _rebuild_kernel[(programs,)](
        keys.left_BNCU, keys.right_BKUD, keys.rotation.table_TZP, records_BKZXCD, fetch.entries, fetch.count,
        fetch.entries.shape[1], kv_heads, chunks, slots, U=rank, C=chunk, D=head_dim,
        PP=max(SMALLEST, triton.next_power_of_2(head_dim // 2)), CHUNKS=max(1, tile // chunk),
        BLOCK_U=RANK_BLOCK, INTERPRETED=triton.knobs.runtime.interpret, num_warps=num_warps,
    )  # fmt: skip


def _check(keys: LowRankKeys, records_BKZXCD: Tensor) -> None:
    chunk = keys.left_BNCU.shape[2]
    require(chunk & (chunk - 1) == 0, "chunk", chunk, "a power of two")
    tensors = (keys.left_BNCU, keys.right_BKUD, keys.rotation.table_TZP, records_BKZXCD)
    require(all(t.is_contiguous() for t in tensors), "strides", "strided", "contiguous tensors")
    require(len({t.dtype for t in tensors}) == 1, "dtype", [t.dtype for t in tensors], "one dtype for all")
