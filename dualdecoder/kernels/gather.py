"""Zero-copy gather: chunk records straight from page-locked host memory into buffer slots on the device.

A few programs walk a compact fetch list (``dualdecoder.kernels.fetch_list.FetchList``). The link needs about 55 GB/s x
2.5 us = 140 KB of reads in flight; ``programs * rows * record`` should be about twice that, for a program waits for its
reads before it stores and goes on. Few programs with many rows leave the other SMs to the compute stream; a program on
each SM would stall every SM's memory path behind the link. Records move as 16-byte vectors, 512 contiguous bytes a warp
and instruction: narrower reads are limited by their number (measured at 128 bytes a warp: 15 GB/s).
Suffixes: A host sequences, B sequences, K KV heads, N chunks, Z slots, X = K and V, C tokens of a chunk, D head size,
R records in flight of one program, W int32 words of a record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.kernels.fetch_list import FetchList

# Records with keys and values that a program has in flight.
ROWS_OF_PAIRS = 4


@triton.jit
def _entries(entries_ptr, capacity, at_R, count):
    """Head, chunk and slot of some list entries; zeros beyond the list's end."""
    exists_R = at_R < count
    head_R = tl.load(entries_ptr + at_R, mask=exists_R, other=0)
    chunk_R = tl.load(entries_ptr + capacity + at_R, mask=exists_R, other=0)
    return head_R, chunk_R, tl.load(entries_ptr + 2 * capacity + at_R, mask=exists_R, other=0)


@triton.jit
def _gather_kernel(
    host_ptr,  # int32 words of [A, K, N, X, C, D], host memory
    buffer_ptr,  # int32 words of [B, K, Z, 2, C, D]
    entries_ptr,
    count_ptr,
    capacity,
    first_sequence,
    sequences,
    heads,
    chunks,
    slots,
    WORDS: tl.constexpr,
    SLOT_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,
):
    count = tl.load(count_ptr)
    step = tl.num_programs(0) * ROWS
    row_R, word_W = tl.arange(0, ROWS), tl.arange(0, BLOCK_W)
    begin = tl.program_id(0) * ROWS
    head_R, chunk_R, slot_R = _entries(entries_ptr, capacity, begin + row_R, count)
    for first in range(begin, count, step):
        host_head_R = (head_R // heads + first_sequence) % sequences * heads + head_R % heads
        source_R = host_head_R.to(tl.int64) * chunks + chunk_R
        target_R = head_R.to(tl.int64) * slots + slot_R
        moved_RW = (first + row_R < count)[:, None] & (word_W < WORDS)[None, :]
        words_RW = tl.load(host_ptr + source_R[:, None] * WORDS + word_W[None, :], mask=moved_RW)
        # The next entries come while the records are under way; they are not touched before the next round, or the
        # compiler would put the wait for them in front of the records' reads.
        head_R, chunk_R, slot_R = _entries(entries_ptr, capacity, first + step + row_R, count)
        # Records without keys go behind the place of the keys.
        at_R1 = buffer_ptr + (target_R * SLOT_WORDS + (SLOT_WORDS - WORDS))[:, None]
        tl.store(at_R1 + word_W[None, :], words_RW, mask=moved_RW)


def gather_records(
    host_AKNXCD: Tensor,
    buffer_BKZXCD: Tensor,
    fetch: FetchList,
    *,
    first: int = 0,
    programs: int = 32,
    rows: int | None = None,
    num_warps: int = 4,
) -> None:
    """Copy the listed records of one layer from the host store into their buffer slots.

    host_AKNXCD: page-locked CPU memory (or device memory). Sequence b of the buffer reads host sequence ``first + b``,
    modulo A. buffer_BKZXCD: on the device, of the same dtype; X = 2. Host records hold keys and values (X = 2), or only
    values (X = 1), which go to the second half of the slot. Any dtype; a record is a multiple of 4 bytes. ``programs``
    bounds the SMs taken, ``rows`` (a power of two) the records in flight of each: 4, or 8 without keys.
    """
    assert host_AKNXCD.shape[4:] == buffer_BKZXCD.shape[4:] and host_AKNXCD.dtype == buffer_BKZXCD.dtype
    assert host_AKNXCD.shape[3] <= buffer_BKZXCD.shape[3] == 2, "the buffer has room for keys and values"
    assert host_AKNXCD.is_contiguous() and buffer_BKZXCD.is_contiguous(), "records must be contiguous"
    words = host_AKNXCD[0, 0, 0].nbytes // 4
    _gather_kernel[(programs,)](
        host_AKNXCD.view(torch.int32),
        buffer_BKZXCD.view(torch.int32),
        fetch.entries,
        fetch.count,
        fetch.entries.shape[1],
        first,
        *host_AKNXCD.shape[:3],
        buffer_BKZXCD.shape[2],
        WORDS=words,
        SLOT_WORDS=buffer_BKZXCD[0, 0, 0].nbytes // 4,
        BLOCK_W=triton.next_power_of_2(words),
        ROWS=rows or ROWS_OF_PAIRS * 2 // host_AKNXCD.shape[3],
        num_warps=num_warps,
    )
