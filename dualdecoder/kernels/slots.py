"""Which chunks of a selection a buffer lacks, where each lies, and the list of records to fetch.

The reference is ``dualdecoder.buffers.assign_slots``: a held chunk keeps its slot, the r-th missing one takes the r-th
slot whose content is not wanted. One program a sequence and KV head looks chunks up in tables with an entry for every
chunk, in device memory (a block sees its own global writes after a barrier): work grows with S + Z, not with S x Z.
Suffixes: B sequences, K KV heads, N chunks, S selected chunks, Z slots of the buffer (Z >= S).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.ledger import Ledger
from dualdecoder.ops import Counting, History
from dualdecoder.telemetry import FIELDS

SELECTED = tl.constexpr(FIELDS.index("selected"))
HIT = tl.constexpr(FIELDS.index("hit"))
URGENT = tl.constexpr(FIELDS.index("urgent"))
PREFETCHED = tl.constexpr(FIELDS.index("prefetched"))
PREDICTED = tl.constexpr(FIELDS.index("predicted"))
REUSED = tl.constexpr(FIELDS.index("reused"))
COMPARABLE = tl.constexpr(FIELDS.index("comparable"))


@dataclass
class SlotWorkspace:
    """Lookup tables of ``assign_slots``, all zero between launches (``order`` aside); rows are heads (``b * K + k``).

    slot_after: int16 ``[B * K, N]``, one more than the slot that holds the chunk, 0 for none. wanted: int8
    ``[B * K, N]``, 1 for a wanted chunk. order: int16 ``[B * K, S]``, free slots.
    """

    slot_after: Tensor
    wanted: Tensor
    order: Tensor

    @classmethod
    def allocate(cls, ledger: Ledger, heads: int, chunks: int, selected: int) -> SlotWorkspace:
        """Tables for ``heads`` (B * K) rows, booked under ``workspace``; launches that follow each other share them."""
        return cls(
            ledger.on_device("workspace", (heads, chunks), torch.int16),
            ledger.on_device("workspace", (heads, chunks), torch.int8),
            ledger.on_device("workspace", (heads, selected), torch.int16),
        )


@triton.jit
def _append(entries_ptr, capacity, first, head, chunk, slot, listed, position):
    """Write the listed entries into claimed places, the one at ``position`` 1 to ``first``."""
    at = first + position - 1
    # A counter that was not zeroed must not damage other memory.
    listed = listed & (at < capacity)
    tl.store(entries_ptr + at, tl.zeros_like(chunk) + head, mask=listed)
    tl.store(entries_ptr + capacity + at, chunk, mask=listed)
    tl.store(entries_ptr + 2 * capacity + at, slot, mask=listed)


@triton.jit
def _load_chunks(row_ptr, place, places):
    """Chunk numbers of a row, -1 beyond its end."""
    return tl.load(row_ptr + place, mask=place < places, other=-1).to(tl.int32)


@triton.jit
def _look_up(table_ptr, chunk):
    return tl.load(table_ptr + chunk, mask=chunk >= 0, other=0).to(tl.int32)


@triton.jit
def _part(tally, INDEX: tl.constexpr):
    """One of four 16-bit numbers in an int64."""
    return (tally >> (16 * INDEX)) & 0xFFFF


@triton.jit
def _add(counts_ptr, FIELD: tl.constexpr, number, counted):
    tl.atomic_add(counts_ptr + FIELD, number.to(tl.int64) * counted, sem="relaxed")


@triton.jit
def _assign_slots_kernel(
    wanted_ptr,  # [B, K, S], any strides but the last
    wanted_stride_b,
    wanted_stride_k,
    held_ptr,  # int64 [B, K, Z], updated
    slot_ptr,  # int32 [B, K, S], written
    entries_ptr,
    count_ptr,
    slot_after_ptr,
    marked_ptr,
    order_ptr,
    commit_ptr,  # bool as uint8 [B]
    counts_ptr,  # int64 [fields]
    predicted_ptr,  # int64 [B, K, S], updated
    previous_ptr,  # int64 [B, K, S], updated
    following_ptr,  # [B, K, S], any strides but the last
    following_stride_b,
    following_stride_k,
    capacity,
    heads,
    selected,
    slots,
    chunks,
    COUNTS: tl.constexpr,
    REMEMBERS: tl.constexpr,
    COMPARES: tl.constexpr,
    MARKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    head = tl.program_id(0)
    sequence, kv_head = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    place_S, slot_Z = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_Z)
    row, exists_S = head.to(tl.int64) * selected, place_S < selected
    held_ptr += head.to(tl.int64) * slots
    slot_after_ptr += head.to(tl.int64) * chunks
    marked_ptr += head.to(tl.int64) * chunks
    order_ptr += row
    wanted_S = _load_chunks(wanted_ptr + sequence * wanted_stride_b + kv_head * wanted_stride_k, place_S, selected)
    held_Z = _load_chunks(held_ptr, slot_Z, slots)
    # All reads of global memory are issued here: their latency is most of this kernel's time.
    if COUNTS:
        counted = tl.load(commit_ptr + sequence).to(tl.int64)
    if COMPARES:
        predicted_S = _load_chunks(predicted_ptr + row, place_S, selected)
        previous_S = _load_chunks(previous_ptr + row, place_S, selected)
    if REMEMBERS:
        following_ptr += sequence * following_stride_b + kv_head * following_stride_k
        following_S = _load_chunks(following_ptr, place_S, selected)
    real_S, filled_Z = wanted_S >= 0, held_Z >= 0
    tl.store(slot_after_ptr + held_Z, (slot_Z + 1).to(tl.int16), mask=filled_Z)
    tl.store(marked_ptr + wanted_S, tl.full([BLOCK_S], 1, tl.int8), mask=real_S)
    tl.debug_barrier()
    slot_S = _look_up(slot_after_ptr, wanted_S) - 1
    free_Z = (slot_Z < slots) & (_look_up(marked_ptr, held_Z) == 0)
    missing_S = real_S & (slot_S < 0)
    # One reduction for all counts of the selection, 16 bits each.
    tally_S = missing_S.to(tl.int64) + (real_S.to(tl.int64) << 16)
    if COMPARES:
        tally_S += _look_up(marked_ptr, predicted_S).to(tl.int64) << 32
        tally_S += _look_up(marked_ptr, previous_S).to(tl.int64) << 48
    tally = tl.sum(tally_S, axis=0)
    rank_S = tl.cumsum(missing_S.to(tl.int32), axis=0)
    rank_Z = tl.cumsum(free_Z.to(tl.int32), axis=0)
    tl.store(order_ptr + rank_Z - 1, slot_Z.to(tl.int16), mask=free_Z & (rank_Z <= selected))
    # Also: everyone has looked up what is erased and overwritten from here on.
    tl.debug_barrier()
    free_S = tl.load(order_ptr + rank_S - 1, mask=missing_S, other=0).to(tl.int32)
    # Under way at the same time as this load: the atomic.
    first = tl.atomic_add(count_ptr, _part(tally, 0).to(tl.int32), sem="relaxed")
    slot_S = tl.where(missing_S, free_S, tl.maximum(slot_S, 0))
    tl.store(slot_after_ptr + held_Z, tl.zeros([BLOCK_Z], tl.int16), mask=filled_Z)
    tl.store(marked_ptr + wanted_S, tl.zeros([BLOCK_S], tl.int8), mask=real_S)
    tl.store(held_ptr + slot_S, wanted_S.to(tl.int64), mask=missing_S)
    if MARKS:
        tl.store(slot_ptr + row + place_S, tl.where(missing_S, -1, slot_S), mask=exists_S)
    else:
        tl.store(slot_ptr + row + place_S, slot_S, mask=exists_S)
    _append(entries_ptr, capacity, first, head, wanted_S, slot_S, missing_S, rank_S)
    if REMEMBERS:
        tl.store(predicted_ptr + row + place_S, following_S.to(tl.int64), mask=exists_S)
        tl.store(previous_ptr + row + place_S, wanted_S.to(tl.int64), mask=exists_S)
    if COUNTS:
        _add(counts_ptr, SELECTED, _part(tally, 1), counted)
        _add(counts_ptr, HIT, _part(tally, 1) - _part(tally, 0), counted)
        _add(counts_ptr, URGENT, _part(tally, 0), counted)
        _add(counts_ptr, PREFETCHED, tl.sum(filled_Z.to(tl.int32), axis=0), counted)
        if COMPARES:
            _add(counts_ptr, PREDICTED, _part(tally, 2), counted)
            _add(counts_ptr, REUSED, _part(tally, 3), counted)
            _add(counts_ptr, COMPARABLE, _part(tally, 1), counted)


@triton.jit
def _replace_all_kernel(
    chunk_ptr,  # [B, K, S], any strides but the last
    chunk_stride_b,
    chunk_stride_k,
    held_ptr,  # int64 [B, K, S], written
    entries_ptr,
    count_ptr,
    capacity,
    heads,
    slots,
    BLOCK_S: tl.constexpr,
):
    head = tl.program_id(0)
    slot_S = tl.arange(0, BLOCK_S)
    chunk_ptr += (head // heads).to(tl.int64) * chunk_stride_b + (head % heads).to(tl.int64) * chunk_stride_k
    chunk_S = tl.load(chunk_ptr + slot_S, mask=slot_S < slots, other=-1).to(tl.int32)
    tl.store(held_ptr + head.to(tl.int64) * slots + slot_S, chunk_S.to(tl.int64), mask=slot_S < slots)
    real_S = chunk_S >= 0
    first = tl.atomic_add(count_ptr, tl.sum(real_S.to(tl.int32), axis=0), sem="relaxed")
    position_S = tl.cumsum(real_S.to(tl.int32), axis=0)
    _append(entries_ptr, capacity, first, head, chunk_S, slot_S, real_S, position_S)


def assign_slots(
    wanted_BKS: Tensor,
    held_BKZ: Tensor,
    slot_BKS: Tensor,
    fetch: FetchList,
    workspace: SlotWorkspace,
    counting: Counting | None = None,
    *,
    marks_missing: bool = False,
    num_warps: int = 8,
) -> None:
    """Find the wanted chunks in the buffer, give the missing ones slots, and append them to ``fetch``.

    wanted_BKS: int32 or int64, distinct chunks in any order, -1 for none; may be strided in B and K.
    held_BKZ: int64, distinct chunks that the slots hold (-1: empty); updated for the missing ones.
    slot_BKS: int32, written; 0 where nothing is wanted; with ``marks_missing``, -1 for the missing ones. The caller
    zeroes ``fetch.count`` before.
    counting: what to count, and the tables to compare with and then overwrite.
    """
    batch, heads, selected = wanted_BKS.shape
    slots = held_BKZ.shape[-1]
    assert slots >= selected and slot_BKS.shape == wanted_BKS.shape, "every wanted chunk needs a slot"
    assert slots < 2**15, "slot numbers are kept in 16 bits"
    assert workspace.order.shape == (batch * heads, selected), "the workspace must have the selection's shape"
    _check(fetch, wanted_BKS, held_BKZ, slot_BKS)
    history = counting.history if counting else None
    _assign_slots_kernel[(batch * heads,)](
        wanted_BKS, *wanted_BKS.stride()[:2], held_BKZ, slot_BKS, fetch.entries, fetch.count,
        workspace.slot_after, workspace.wanted, workspace.order,
        # A pointer that is not used may be any valid one.
        *(_counters(counting) if counting else (slot_BKS, slot_BKS)),
        *(_tables(history, wanted_BKS) if history else (slot_BKS, slot_BKS, slot_BKS, 0, 0)),
        fetch.entries.shape[1], heads, selected, slots, workspace.wanted.shape[1],
        COUNTS=counting is not None,
        REMEMBERS=history is not None,
        COMPARES=history is not None and history.comparable,
        MARKS=marks_missing,
        BLOCK_S=triton.next_power_of_2(selected),
        BLOCK_Z=triton.next_power_of_2(slots),
        num_warps=num_warps,
    )  # fmt: skip


def _counters(counting: Counting) -> tuple[Tensor, Tensor]:
    assert counting.counts_F.is_contiguous() and counting.commit_B.is_contiguous()
    return counting.commit_B.view(torch.uint8), counting.counts_F


def _tables(history: History, wanted_BKS: Tensor) -> tuple[Tensor | int, ...]:
    tables, following_BKS = (history.predicted_BKS, history.selected_BKS), history.following_BKS
    assert all(t.is_contiguous() and t.shape == wanted_BKS.shape for t in tables)
    assert following_BKS.shape == wanted_BKS.shape and following_BKS.stride(-1) == 1
    return *tables, following_BKS, *following_BKS.stride()[:2]


def replace_all(chunk_BKS: Tensor, held_BKS: Tensor, fetch: FetchList, *, num_warps: int = 4) -> None:
    """Let the buffer hold exactly ``chunk_BKS``, slot i the i-th, and append all of them to ``fetch``.

    chunk_BKS: int32 or int64, -1 for none; may be strided in B and K. held_BKS: int64, written. The caller zeroes
    ``fetch.count`` before.
    """
    batch, heads, slots = chunk_BKS.shape
    assert held_BKS.shape == chunk_BKS.shape, "one slot a chunk"
    _check(fetch, chunk_BKS, held_BKS)
    _replace_all_kernel[(batch * heads,)](
        chunk_BKS,
        *chunk_BKS.stride()[:2],
        held_BKS,
        fetch.entries,
        fetch.count,
        fetch.entries.shape[1],
        heads,
        slots,
        BLOCK_S=triton.next_power_of_2(slots),
        num_warps=num_warps,
    )


def _check(fetch: FetchList, chunk_BKS: Tensor, *written: Tensor) -> None:
    assert fetch.entries.shape[1] >= chunk_BKS.numel(), "the list must hold every chunk"
    assert chunk_BKS.stride(-1) == 1 and all(t.is_contiguous() for t in (fetch.entries, *written))
