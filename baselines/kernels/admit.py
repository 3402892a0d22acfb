"""Capped admission into a resident set on the device, with the meaning of ``baselines.admission.ReferenceAdmission``.

One program a sequence and KV head. It compares all predicted with all resident blocks, then every entry's key with all
others': the rank among new blocks, and the rank among slots that may be taken. Equal ranks are paired. S x S
comparisons, S of some hundreds, need no table of all blocks and no loop over admissions. A key is unique: the score or
the clock above, the block number or the slot in the lower 32 bits. Other threads' keys come through device memory.
Suffixes: B sequences, K KV heads, S resident or predicted blocks padded to a power of two, J some of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baselines.admission import FIELDS, Prediction, Resident
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.kernels.gather import gather_records
from dualdecoder.kernels.slots import FetchList
from dualdecoder.ledger import Ledger

MAX_SLOTS = 512
# Entries compared with all S at once: 64 comparisons a thread, with two warps for each 128 entries.
SOME = tl.constexpr(32)
HIGHEST = tl.constexpr(2**31 - 1)
LARGEST = tl.constexpr(2**63 - 1)
# A record of 16 tokens is 8 KiB: 32 programs with two each keep four times the link's latency in flight.
ROWS_IN_FLIGHT = 2


@triton.jit
def _is_among(these_S, others_ptr, count, SP: tl.constexpr):
    """1 for each of these blocks that is listed among ``count`` others."""
    found_S = tl.zeros(these_S.shape, tl.int32)
    for first in range(0, SP, SOME):
        j = first + tl.arange(0, SOME)
        # Below all that a block or the lack of one can be.
        other_J = tl.load(others_ptr + j, mask=j < count, other=-3)
        found_S += tl.sum((these_S[:, None] == other_J[None, :]).to(tl.int32), axis=1)
    return found_S


@triton.jit
def _rank(key_S, keys_ptr, SP: tl.constexpr):
    """How many of the SP keys in memory are smaller."""
    smaller_S = tl.zeros(key_S.shape, tl.int32)
    for first in range(0, SP, SOME):
        other_J = tl.load(keys_ptr + first + tl.arange(0, SOME))
        smaller_S += tl.sum((other_J[None, :] < key_S[:, None]).to(tl.int32), axis=1)
    return smaller_S


@triton.jit
def _falling(score_S):
    """Integers in the opposite order of the scores; -0 like 0."""
    bits_S = tl.where(score_S == 0.0, 0.0, score_S).to(tl.int32, bitcast=True)
    return ~(bits_S ^ ((bits_S >> 31) & HIGHEST))


@triton.jit
def _admit_kernel(
    number_ptr, number_stride_b, number_stride_k,  # int64 [B, K, S]
    scores_ptr, scores_stride,  # fp32, a row a head
    held_ptr, used_ptr,  # int64 [B, K, S], updated
    clock_ptr, commit_ptr, counts_ptr, entries_ptr, count_ptr, keys_ptr, capacity, cap,
    K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b = head // K
    if tl.load(commit_ptr + b):
        s = tl.arange(0, SP)
        number_ptr += b * number_stride_b + head % K * number_stride_k
        held_ptr += head * S
        used_ptr += head * S
        number_S = tl.load(number_ptr + s, mask=s < S, other=-1)
        held_S = tl.load(held_ptr + s, mask=s < S, other=-1)
        predicted_S = number_S >= 0
        kept_S = predicted_S & (_is_among(number_S, held_ptr, S, SP) > 0)
        wanted_S = (held_S >= 0) & (_is_among(held_S, number_ptr, S, SP) > 0)
        new_S, free_S = predicted_S & ~kept_S, (s < S) & ~wanted_S
        score_S = tl.load(scores_ptr + head * scores_stride + number_S, mask=new_S, other=0.0)
        age_S = tl.where(held_S >= 0, tl.load(used_ptr + s, mask=free_S, other=0), -1)
        new_key_S = tl.where(new_S, (_falling(score_S).to(tl.int64) << 32) + number_S, LARGEST)
        slot_key_S = tl.where(free_S, (age_S << 32) + s, LARGEST)
        # Scratch of a head: keys of new blocks, keys of slots, admitted blocks by rank.
        keys_ptr += head * (3 * SP)
        tl.store(keys_ptr + s, new_key_S)
        tl.store(keys_ptr + SP + s, slot_key_S)
        tl.debug_barrier()
        admitted = tl.minimum(tl.sum(new_S.to(tl.int32), axis=0), cap)
        order_S = _rank(new_key_S, keys_ptr, SP)
        tl.store(keys_ptr + 2 * SP + order_S, number_S, mask=new_S & (order_S < admitted))
        tl.debug_barrier()
        turn_S = _rank(slot_key_S, keys_ptr + SP, SP)
        # There are at least as many free slots as new blocks, for there are as many slots as predictions.
        taken_S = free_S & (turn_S < admitted)
        chunk_S = tl.load(keys_ptr + 2 * SP + turn_S, mask=taken_S, other=-1)
        tl.store(held_ptr + s, chunk_S, mask=taken_S)
        tl.store(used_ptr + s, tl.zeros_like(chunk_S) + tl.load(clock_ptr + b), mask=taken_S | wanted_S)
        first = tl.atomic_add(count_ptr, admitted, sem="relaxed")
        at_S = first + turn_S
        # A counter that was not zeroed must not damage other memory.
        listed_S = taken_S & (at_S < capacity)
        tl.store(entries_ptr + at_S, (tl.zeros_like(chunk_S) + head).to(tl.int32), mask=listed_S)
        tl.store(entries_ptr + capacity + at_S, chunk_S.to(tl.int32), mask=listed_S)
        tl.store(entries_ptr + 2 * capacity + at_S, s, mask=listed_S)
        tl.atomic_add(counts_ptr, tl.sum(predicted_S.to(tl.int64), axis=0), sem="relaxed")
        tl.atomic_add(counts_ptr + 1, tl.sum(kept_S.to(tl.int64), axis=0), sem="relaxed")
        tl.atomic_add(counts_ptr + 2, admitted.to(tl.int64), sem="relaxed")


def admit_blocks(
    prediction: Prediction, resident: Resident, counts_F: Tensor, fetch: FetchList, keys: Tensor, cap: int
) -> None:
    """Update the resident table, its clocks and the counts; append the admitted blocks to the fetch list.

    ``keys``: int64 scratch of ``3 * padded(S)`` numbers a head. Clocks are below 2**31. The order of the list between
    heads is not defined. Raises ``ConfigError`` for more than 512 slots and for strides.
    """
    batch, kv_heads, slots = resident.used_BKS.shape
    number_BKS, scores_BKN = prediction.number_BKS, prediction.scores_BKN
    assert number_BKS.shape == resident.used_BKS.shape and keys.numel() >= batch * kv_heads * 3 * padded(slots)
    require(slots <= MAX_SLOTS, "slots", slots, f"at most {MAX_SLOTS}")
    ok = number_BKS.stride(2) == scores_BKN.stride(2) == 1 and scores_BKN.stride(0) == kv_heads * scores_BKN.stride(1)
    require(ok, "strides", (number_BKS.stride(), scores_BKN.stride()), "dense rows, one score row after the other")
    _admit_kernel[(batch * kv_heads,)](
        number_BKS, *number_BKS.stride()[:2], scores_BKN, scores_BKN.stride(1), resident.buffer.held_BKS,
        resident.used_BKS, prediction.clock_B, prediction.commit_B, counts_F, fetch.entries, fetch.count, keys,
        fetch.entries.shape[1], cap, K=kv_heads, S=slots, SP=padded(slots),
        num_warps=max(1, padded(slots) // 64),
    )  # fmt: skip


def padded(slots: int) -> int:
    """Entries of a head that the kernel works on."""
    return max(SOME.value, triton.next_power_of_2(slots))


class TritonAdmission:
    """The kernel and its workspaces for all layers. Each layer has its own list: several may be under way at once."""

    def __init__(self, ledger: Ledger, *, layers: int, heads: int, slots: int, cap: int) -> None:
        require(slots <= MAX_SLOTS, "budget", (slots + 1) * 16, f"at most {(MAX_SLOTS + 1) * 16} tokens on a GPU")
        assert len(FIELDS) == 3
        self.cap = cap
        self.counters = ledger.on_device("workspace", (layers,), torch.int32)
        self.keys = ledger.on_device("workspace", (heads * 3 * padded(slots),), torch.int64)
        entries = [ledger.on_device("workspace", (3, heads * cap), torch.int32) for _ in range(layers)]
        self.lists = [FetchList(e, count) for e, count in zip(entries, self.counters.split(1), strict=True)]

    def begin_step(self) -> None:
        self.counters.zero_()

    def admit(self, layer: int, prediction: Prediction, resident: Resident, counts_F: Tensor) -> FetchList:
        fetch = self.lists[layer]
        admit_blocks(prediction, resident, counts_F, fetch, self.keys, self.cap)
        return fetch

    def fetch(self, host: HostStore, layer: int, fetch: FetchList, buffer: ChunkBuffer) -> None:
        gather_records(host.records[layer], buffer.records_BKSXCD, fetch, rows=ROWS_IN_FLIGHT)
