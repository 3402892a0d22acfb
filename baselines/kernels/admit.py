"""Capped admission into a resident set on the device, with the meaning of ``baselines.admission.ReferenceAdmission``.

One program a sequence and KV head; nothing but its tables and its part of the list goes through device memory. It
compares all predicted with all resident blocks in registers, then sorts a key of every new block and one of every slot
that may be taken: the r-th new block takes the r-th slot. A key is unique: the score or the clock above, the block
number or the slot in the lower 32 bits. There is no loop, and three round trips to memory remain: tables, scores, the
place in the list.
Suffixes: B sequences, K KV heads, S resident or predicted blocks padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baselines.admission import FIELDS, Prediction, Resident
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.kernels.gather import gather_records
from dualdecoder.ledger import Ledger

MAX_SLOTS = 512
# One entry a thread. With more threads Triton would read a table again for each comparison.
WARP = 32
HIGHEST = tl.constexpr(2**31 - 1)
LARGEST = tl.constexpr(2**63 - 1)
# A record of 16 tokens is 8 KiB: 32 programs with two each keep four times the link's latency in flight.
ROWS_IN_FLIGHT = 2


@triton.jit
def _is_among(these_S, others_S):
    """Which of these blocks are among the others. A thread keeps one of them and compares it with all others itself."""
    return tl.sum((others_S[:, None] == these_S[None, :]).to(tl.int32), axis=0) > 0


@triton.jit
def _falling(score_S):
    """Integers in the opposite order of the scores; -0 like 0."""
    bits_S = tl.where(score_S == 0.0, 0.0, score_S).to(tl.int32, bitcast=True)
    return ~(bits_S ^ ((bits_S >> 31) & HIGHEST))


@triton.jit
def _ascending(keys_S, others_S):
    """Both in ascending order; in one sort, so that each one's exchanges are under way beside the other's."""
    return tl.split(tl.trans(tl.sort(tl.trans(tl.join(keys_S, others_S)))))


@triton.jit
def _admit_kernel(
    number_ptr, number_stride_b, number_stride_k,  # int64 [B, K, S]
    scores_ptr, scores_stride,  # fp32, a row a head
    held_ptr, used_ptr,  # int64 [B, K, S], updated
    clock_ptr, commit_ptr, counts_ptr, entries_ptr, count_ptr, capacity, cap,
    K: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b = head // K
    s = tl.arange(0, SP)
    exists_S = s < S
    number_ptr += b * number_stride_b + head % K * number_stride_k
    held_ptr += head * S
    used_ptr += head * S
    # All reads of global memory are issued here: with the scores' and the list's, their latency is most of the time.
    number_S = tl.load(number_ptr + s, mask=exists_S, other=-1).to(tl.int32)
    held_S = tl.load(held_ptr + s, mask=exists_S, other=-1).to(tl.int32)
    used_S = tl.load(used_ptr + s, mask=exists_S, other=0)
    clock, commit = tl.load(clock_ptr + b), tl.load(commit_ptr + b)
    predicted_S = number_S >= 0
    score_S = tl.load(scores_ptr + head * scores_stride + number_S, mask=predicted_S, other=0.0)
    if commit:
        kept_S = predicted_S & _is_among(number_S, held_S)
        wanted_S = (held_S >= 0) & _is_among(held_S, number_S)
        # One reduction for both counts, 16 bits each.
        tally = tl.sum(predicted_S.to(tl.int32) + (kept_S.to(tl.int32) << 16), axis=0)
        predicted, kept = tally & 0xFFFF, tally >> 16
        admitted = tl.minimum(predicted - kept, cap)
        # Under way while the keys are sorted.
        first = tl.atomic_add(count_ptr, admitted, sem="relaxed")
        age_S = tl.where(held_S >= 0, used_S, -1)
        new_key_S = tl.where(predicted_S & ~kept_S, (_falling(score_S).to(tl.int64) << 32) + number_S, LARGEST)
        slot_key_S = tl.where(exists_S & ~wanted_S, (age_S << 32) + s, LARGEST)
        # There are at least as many free slots as new blocks, for there are as many slots as predictions.
        new_key_S, slot_key_S = _ascending(new_key_S, slot_key_S)
        chunk_S, slot_S = new_key_S.to(tl.int32), slot_key_S.to(tl.int32)
        taken_S = s < admitted
        clock_S = tl.zeros_like(used_S) + clock
        tl.store(used_ptr + s, clock_S, mask=wanted_S)
        tl.store(used_ptr + slot_S, clock_S, mask=taken_S)
        tl.store(held_ptr + slot_S, chunk_S.to(tl.int64), mask=taken_S)
        # A counter that was not zeroed must not damage other memory.
        at_S = first + s
        listed_S = taken_S & (at_S < capacity)
        tl.store(entries_ptr + at_S, tl.zeros_like(chunk_S) + head.to(tl.int32), mask=listed_S)
        tl.store(entries_ptr + capacity + at_S, chunk_S, mask=listed_S)
        tl.store(entries_ptr + 2 * capacity + at_S, slot_S, mask=listed_S)
        tl.atomic_add(counts_ptr, predicted.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts_ptr + 1, kept.to(tl.int64), sem="relaxed")
        tl.atomic_add(counts_ptr + 2, admitted.to(tl.int64), sem="relaxed")


def admit_blocks(prediction: Prediction, resident: Resident, counts_F: Tensor, fetch: FetchList, cap: int) -> None:
    """Update the resident table, its clocks and the counts; append the admitted blocks to the fetch list.

    Clocks are below 2**31. The order of the list between heads is not defined. Raises ``ConfigError`` for more than 512
    slots and for strides.
    """
    batch, kv_heads, slots = resident.used_BKS.shape
    number_BKS, scores_BKN = prediction.number_BKS, prediction.scores_BKN
    assert number_BKS.shape == resident.used_BKS.shape
    assert resident.used_BKS.is_contiguous() and resident.buffer.held_BKS.is_contiguous()
    require(slots <= MAX_SLOTS, "slots", slots, f"at most {MAX_SLOTS}")
    ok = number_BKS.stride(2) == scores_BKN.stride(2) == 1 and scores_BKN.stride(0) == kv_heads * scores_BKN.stride(1)
    require(ok, "strides", (number_BKS.stride(), scores_BKN.stride()), "dense rows, one score row after the other")
    padded = max(WARP, triton.next_power_of_2(slots))
    _admit_kernel[(batch * kv_heads,)](
        number_BKS, *number_BKS.stride()[:2], scores_BKN, scores_BKN.stride(1), resident.buffer.held_BKS,
        resident.used_BKS, prediction.clock_B, prediction.commit_B, counts_F, fetch.entries, fetch.count,
        fetch.entries.shape[1], cap, K=kv_heads, S=slots, SP=padded, num_warps=padded // WARP,
    )  # fmt: skip


class TritonAdmission:
    """The kernel and its lists for all layers. Each layer has its own list: several may be under way at once."""

    def __init__(self, ledger: Ledger, *, layers: int, heads: int, slots: int, cap: int) -> None:
        require(slots <= MAX_SLOTS, "budget", (slots + 1) * 16, f"at most {(MAX_SLOTS + 1) * 16} tokens on a GPU")
        assert len(FIELDS) == 3
        self.cap = cap
        self.counters, self.lists = FetchList.for_layers(ledger, layers, heads * cap)

    def begin_step(self) -> None:
        self.counters.zero_()

    def admit(self, layer: int, prediction: Prediction, resident: Resident, counts_F: Tensor) -> FetchList:
        fetch = self.lists[layer]
        admit_blocks(prediction, resident, counts_F, fetch, self.cap)
        return fetch

    def fetch(self, host: HostStore, layer: int, fetch: FetchList, buffer: ChunkBuffer) -> None:
        gather_records(host.records[layer], buffer.records_BKSXCD, fetch, rows=ROWS_IN_FLIGHT)
