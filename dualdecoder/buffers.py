"""Chunk buffers on the device: two of them, used by the layers in turn (paper section 5.4).

A buffer has S slots a sequence and KV head. ``held`` says which chunk each slot holds; ``assign_slots`` finds, for
a selection, which chunks are there and which slots the missing ones may take.
Suffixes: B sequences, K KV heads, S slots, X = K and V, C tokens of a chunk, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.landmarks import NO_CHUNK, mark_chunks, or_spare
from dualdecoder.ledger import Ledger


@dataclass
class ChunkBuffer:
    """Records of S chunks a sequence and KV head, and their chunk numbers (``NO_CHUNK``: empty)."""

    records_BKSXCD: Tensor
    held_BKS: Tensor

    @classmethod
    def allocate(
        cls, model: ModelConfig, batch: int, slots: int, chunk: int, dtype: torch.dtype, ledger: Ledger
    ) -> ChunkBuffer:
        """An empty buffer, booked under ``buffers``."""
        lead = (batch, model.kv_heads, slots)
        records = ledger.on_device("buffers", (*lead, 2, chunk, model.head_dim), dtype)
        return cls(records, ledger.on_device("buffers", lead, torch.int64).fill_(NO_CHUNK))

    def relabel(self, slot_BKS: Tensor, chunk_BKS: Tensor, where_BKS: Tensor) -> None:
        """Enter chunks into the table where ``where_BKS`` holds. Those slots must differ within a head."""
        self.held_BKS.copy_(_scatter(self.held_BKS, self._target(slot_BKS, where_BKS), chunk_BKS))

    def put(self, slot_BKS: Tensor, records_BKSXCD: Tensor, where_BKS: Tensor, half: int = 0) -> None:
        """Write records into slots where ``where_BKS`` holds. Those slots must differ within a head.

        Records of one half only (X = 1) are keys with ``half`` 0 and values with ``half`` 1.
        """
        kept_BKSXCD = self.records_BKSXCD[:, :, :, half : half + records_BKSXCD.shape[3]]
        kept_BKSXCD.copy_(_scatter(kept_BKSXCD, self._target(slot_BKS, where_BKS), records_BKSXCD))

    def _target(self, slot_BKS: Tensor, where_BKS: Tensor) -> Tensor:
        # Entries that are not written go to a spare slot, so that nothing depends on how many there are.
        return slot_BKS.where(where_BKS, self.held_BKS.shape[-1])

    def clear(self) -> None:
        """Hold nothing."""
        self.held_BKS.fill_(NO_CHUNK)

    def part(self, sequences: slice) -> ChunkBuffer:
        """The same memory, of some of the sequences."""
        return ChunkBuffer(self.records_BKSXCD[sequences], self.held_BKS[sequences])

    def present(self, chunk_BKS: Tensor, slot_BKS: Tensor) -> Tensor:
        """Those of the chunks that their slots hold, or that have no slot (below 0); ``NO_CHUNK`` for the others."""
        held_BKS = self.held_BKS.gather(-1, slot_BKS.long().clamp(min=0))
        return chunk_BKS.where((held_BKS == chunk_BKS) | (slot_BKS < 0), NO_CHUNK)

    def take(self, slot_BKS: Tensor) -> Tensor:
        """Records of the slots, in the given order."""
        return self.records_BKSXCD.gather(2, _expand(slot_BKS, self.records_BKSXCD))


def _expand(index_BKS: Tensor, like: Tensor) -> Tensor:
    extra = like.dim() - index_BKS.dim()
    return index_BKS.view(*index_BKS.shape, *[1] * extra).expand(*index_BKS.shape, *like.shape[3:])


def _scatter(base: Tensor, target_BKS: Tensor, values: Tensor) -> Tensor:
    padded = torch.cat((base, base[:, :, :1]), dim=2)
    return padded.scatter_(2, _expand(target_BKS, base), values)[:, :, :-1]


def assign_slots(wanted_BKS: Tensor, held_BKS: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Slot of every wanted chunk, and which of them are missing.

    A chunk that is held keeps its slot. Each missing one gets a slot of its own whose content is not wanted.
    ``NO_CHUNK`` entries get slot 0 and are not missing. Neither argument may list a chunk twice.
    """
    slot_number = torch.arange(held_BKS.shape[-1], device=held_BKS.device).expand_as(held_BKS)
    slot_of_chunk = torch.full((*held_BKS.shape[:-1], chunks + 1), -1, device=held_BKS.device)
    slot_of_chunk.scatter_(-1, or_spare(held_BKS, chunks), slot_number)
    slot_of_chunk[..., chunks] = 0
    slot_BKS = slot_of_chunk.gather(-1, or_spare(wanted_BKS, chunks))
    missing_BKS = slot_BKS < 0
    free_first_BKS = _free_slots_first(wanted_BKS, held_BKS, chunks)
    rank_BKS = (missing_BKS.cumsum(dim=-1) - 1).clamp(min=0)
    return torch.where(missing_BKS, free_first_BKS.gather(-1, rank_BKS), slot_BKS), missing_BKS


def _free_slots_first(wanted_BKS: Tensor, held_BKS: Tensor, chunks: int) -> Tensor:
    kept_BKS = mark_chunks(wanted_BKS, chunks).gather(-1, or_spare(held_BKS, chunks)) & (held_BKS != NO_CHUNK)
    return kept_BKS.to(torch.int8).argsort(dim=-1, stable=True)
