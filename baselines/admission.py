"""Which predicted blocks enter a layer's resident set, and which leave: OasisKV's capped admission.

A predicted block that is resident stays for free. At most ``cap`` of the others are admitted per KV head and step,
those with the highest scores first. Each takes the slot of a block that is resident but not predicted: empty slots
first, then the blocks that were predicted longest ago. Ties go to the lower block number, and to the lower slot.
The paper does not say in which order blocks are admitted, nor how ties are broken: both are choices made here.
Suffixes: B sequences, K KV heads, S resident or predicted blocks, N blocks, Q = cap, F fields of the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dualdecoder.buffers import ChunkBuffer
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import NO_CHUNK, mark_chunks, or_spare
from dualdecoder.ops import ReferenceFetch

# predicted: blocks of the predictions. kept: of those, resident already. admitted: of those, brought in.
FIELDS = ("predicted", "kept", "admitted")
NEVER = -1
ALWAYS = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Resident:
    """Resident blocks of a layer and the clock at which each was last predicted (int64 ``[B, K, S]``)."""

    buffer: ChunkBuffer
    used_BKS: Tensor


@dataclass(frozen=True)
class Prediction:
    """What a layer will probably need in the next step.

    number_BKS: int64 block numbers, ``NO_CHUNK`` for none, no block twice, in any order; any strides but the last.
    scores_BKN: fp32, finite for predicted blocks. clock_B: int64, larger with each step. commit_B (bool): the
    sequences whose prediction counts; all others stay as they are.
    """

    number_BKS: Tensor
    scores_BKN: Tensor
    clock_B: Tensor
    commit_B: Tensor


class Admission(Protocol):
    """Admission for all layers of a method."""

    def begin_step(self) -> None:
        """Called before a step's admissions; each layer has one at most."""

    def admit(self, layer: int, prediction: Prediction, resident: Resident, counts_F: Tensor) -> Any:
        """Update the resident table and its clocks, add to the counts (int64, as ``FIELDS``); returns the fetch."""

    def fetch(self, host: HostStore, layer: int, fetch: Any, buffer: ChunkBuffer) -> None:
        """Copy the admitted blocks from the host into their slots."""


class ReferenceAdmission:
    """PyTorch on any device that can index the host store directly."""

    def __init__(self, chunks: int, cap: int) -> None:
        self.chunks, self.cap = chunks, cap

    def begin_step(self) -> None:
        pass  # Nothing is kept from step to step.

    def admit(self, layer: int, prediction: Prediction, resident: Resident, counts_F: Tensor) -> ReferenceFetch:
        number_BKS, held_BKS = prediction.number_BKS, resident.buffer.held_BKS
        kept_BKS, wanted_BKS = _common(number_BKS, held_BKS, self.chunks), _common(held_BKS, number_BKS, self.chunks)
        new_BKS = (number_BKS != NO_CHUNK) & ~kept_BKS
        chunk_BKQ = _best_first(number_BKS, new_BKS, prediction.scores_BKN)[..., : self.cap]
        slot_BKQ = _oldest_first(held_BKS, wanted_BKS, resident.used_BKS)[..., : self.cap]
        counted_B11 = prediction.commit_B[:, None, None]
        admitted_BKQ = (chunk_BKQ != NO_CHUNK) & counted_B11
        clock_B11 = prediction.clock_B[:, None, None]
        resident.used_BKS.copy_(torch.where(wanted_BKS & counted_B11, clock_B11, resident.used_BKS))
        resident.buffer.relabel(slot_BKQ, chunk_BKQ, admitted_BKQ)
        touched_BKS = _common(resident.buffer.held_BKS, chunk_BKQ.where(admitted_BKQ, NO_CHUNK), self.chunks)
        resident.used_BKS.copy_(torch.where(touched_BKS, clock_B11, resident.used_BKS))
        counted = ((number_BKS != NO_CHUNK) & counted_B11, kept_BKS & counted_B11, admitted_BKQ)
        counts_F += torch.stack([which.sum() for which in counted])
        return ReferenceFetch(chunk_BKQ, slot_BKQ, admitted_BKQ)

    def fetch(self, host: HostStore, layer: int, fetch: ReferenceFetch, buffer: ChunkBuffer) -> None:
        buffer.put(fetch.slot_BKS, host.read(layer, fetch.chunk_BKS), fetch.where_BKS)


def _common(these_BKS: Tensor, others_BKS: Tensor, chunks: int) -> Tensor:
    """Which of these blocks are among the others."""
    return mark_chunks(others_BKS, chunks).gather(-1, or_spare(these_BKS, chunks)) & (these_BKS != NO_CHUNK)


def _best_first(number_BKS: Tensor, new_BKS: Tensor, scores_BKN: Tensor) -> Tensor:
    """The new blocks by falling score, ``NO_CHUNK`` behind them."""
    number_BKS = number_BKS.where(new_BKS, NO_CHUNK).sort(dim=-1).values
    score_BKS = scores_BKN.gather(-1, number_BKS.clamp(min=0)).masked_fill(number_BKS == NO_CHUNK, -torch.inf)
    return number_BKS.gather(-1, score_BKS.argsort(dim=-1, descending=True, stable=True))


def _oldest_first(held_BKS: Tensor, wanted_BKS: Tensor, used_BKS: Tensor) -> Tensor:
    """Slots in the order in which they may be taken; those of wanted blocks come last."""
    age_BKS = used_BKS.where(held_BKS != NO_CHUNK, NEVER)
    return age_BKS.masked_fill(wanted_BKS, ALWAYS).argsort(dim=-1, stable=True)
