"""The operations of one DualDecoder layer in PyTorch: what they mean. ``kernels/ops.py`` has the same in Triton.

Suffixes: B sequences, R rows, H query heads, K KV heads, D head size, N chunks, S selected chunks, O outlier chunks,
C tokens of a chunk, W tokens of the window, X = K and V, P past tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dualdecoder import window
from dualdecoder.attention import step_attention
from dualdecoder.buffers import ChunkBuffer, assign_slots
from dualdecoder.config import ModelConfig
from dualdecoder.host_store import HostStore, read_records
from dualdecoder.landmarks import NO_CHUNK, chunk_landmarks, chunk_scores, count_common, outlier_chunks, top_chunks
from dualdecoder.ledger import Ledger


@dataclass(frozen=True)
class LayerState:
    """What one layer keeps on the device, and the lengths that all layers share."""

    landmarks_BKND: Tensor
    outliers_BKO: Tensor
    outlier_records_BKOXCD: Tensor
    window_BKXWD: Tensor
    length_B: Tensor
    chunks_B: Tensor

    @classmethod
    def allocate(
        cls, model: ModelConfig, length_B: Tensor, chunks_B: Tensor, *, chunks: int, outliers: int, chunk: int,
        window: int, dtype: torch.dtype, ledger: Ledger,
    ) -> LayerState:  # fmt: skip
        """Room for ``chunks`` landmarks, ``outliers`` chunks (at most all) and ``window`` tokens a KV head."""
        head, outliers = (len(length_B), model.kv_heads), min(outliers, chunks)
        records = (*head, outliers, 2, chunk, model.head_dim)
        return cls(
            landmarks_BKND=ledger.on_device("landmarks", (*head, chunks, model.head_dim), dtype),
            outliers_BKO=ledger.on_device("tables", (*head, outliers), torch.int64).fill_(NO_CHUNK),
            outlier_records_BKOXCD=ledger.on_device("outliers", records, dtype),
            window_BKXWD=ledger.on_device("window", (*head, 2, window, model.head_dim), dtype),
            length_B=length_B,
            chunks_B=chunks_B,
        )

    def keep_chunks(self, sequence: int, records_KNXCD: Tensor) -> None:
        """Landmarks and outliers of a prompt's chunks."""
        landmarks_KND = chunk_landmarks(records_KNXCD[:, :, 0])
        self.landmarks_BKND[sequence, :, : landmarks_KND.shape[1]] = landmarks_KND
        outlier_KO = outlier_chunks(records_KNXCD[:, :, 0], landmarks_KND, self.outliers_BKO.shape[-1])
        self.outliers_BKO[sequence] = outlier_KO
        head_K1 = torch.arange(len(outlier_KO), device=outlier_KO.device)[:, None]
        self.outlier_records_BKOXCD[sequence] = records_KNXCD[head_K1, outlier_KO.clamp(min=0)]

    def keep_rest(self, sequence: int, start: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """The prompt's tokens from position ``start`` on, in the window."""
        kv_KXTD = torch.stack((k_TKD[start:], v_TKD[start:])).permute(2, 0, 1, 3)
        window.write_prompt(self.window_BKXWD[sequence], start, kv_KXTD)

    def fill_normal(self, chunks: int, generator: torch.Generator) -> None:
        """Random content for measuring without a prompt; outliers spread evenly over ``chunks`` chunks."""
        for tensor in (self.landmarks_BKND, self.outlier_records_BKOXCD, self.window_BKXWD):
            tensor.normal_(generator=generator)
        outliers = self.outliers_BKO.shape[-1]
        self.outliers_BKO.copy_(torch.arange(outliers, device=generator.device) * (chunks // outliers))

    def part(self, sequences: slice) -> LayerState:
        """The same memory, of some of the sequences."""
        return LayerState(**{name: tensor[sequences] for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class History:
    """A layer's selection from step to step, ``[B, K, S]``.

    predicted_BKS, selected_BKS: int64 tables, what the step before predicted for this one and what it selected;
    overwritten with this step's prediction ``following_BKS`` and selection. comparable: whether the old content says
    anything about this step.
    """

    predicted_BKS: Tensor
    selected_BKS: Tensor
    following_BKS: Tensor
    comparable: bool


@dataclass(frozen=True)
class Counting:
    """Where to count what becomes of a layer's selection.

    counts_F: int64, in the order of ``telemetry.FIELDS``; grows by the counts of the sequences where commit_B (bool)
    holds. Without a comparable history ``predicted``, ``reused`` and ``comparable`` do not grow.
    """

    counts_F: Tensor
    commit_B: Tensor
    history: History | None = None


class Ops(Protocol):
    """Operations of one layer; outputs may live in workspaces that the next call overwrites."""

    def begin_step(self, chunks_B: Tensor) -> None:
        """Called before a step's other operations. In a step, each layer does each of them at most once."""

    def select(self, q_BRHD: Tensor, state: LayerState, count: int) -> Tensor:
        """The ``count`` best chunks of every row, ``[B, R, K, S]``."""

    def find(
        self, wanted_BKS: Tensor, buffer: ChunkBuffer, counting: Counting, in_place: bool = False
    ) -> tuple[Tensor, Any]:
        """Slot of each wanted chunk, and the fetch that brings in the missing ones.

        With ``in_place`` the missing ones are to be read where they lie, in the host store: their slot is -1.
        The buffer's table is updated, the counters grow, then the history's tables are overwritten.
        """

    def replace(self, buffer: ChunkBuffer, chunk_BKS: Tensor) -> Any:
        """Make the buffer's table list these chunks only; returns the fetch that brings them all in."""

    def fetch(self, host: HostStore, layer: int, fetch: Any, buffer: ChunkBuffer) -> None:
        """Copy records from the host into the buffer's slots; only values if the host keeps only those."""

    def attend(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, state: LayerState,
        buffer: ChunkBuffer, chosen_BKS: Tensor, slot_BKS: Tensor, host_AKNXCD: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention to the chosen chunks, outliers, window and, causally, the rows themselves; ``[B, R, H, D]``.

        Chunks with a slot below 0 are read from the layer's host records.
        """

    def commit(
        self,
        k_BKD: Tensor,
        v_BKD: Tensor,
        state: LayerState,
        host: HostStore,
        layer: int,
        commit_B: Tensor,
        flush_B: Tensor,
    ) -> None:
        """Move the oldest chunk of full windows to the host with its landmark, then write row 0 into the window."""

    def append(self, k_BKD: Tensor, v_BKD: Tensor, state: LayerState, commit_B: Tensor) -> None:
        """Write row 0 into a window that has room for it."""


@dataclass(frozen=True)
class ReferenceFetch:
    """Chunks to copy into slots where ``where_BKS`` holds."""

    chunk_BKS: Tensor
    slot_BKS: Tensor
    where_BKS: Tensor


class ReferenceOps:
    """PyTorch on any device that can index the host store directly, that is: on the CPU.

    ``first``: number in the host store of the first of its sequences.
    """

    def __init__(self, chunks: int, chunk: int, first: int = 0) -> None:
        self.chunks, self.chunk, self.first = chunks, chunk, first

    def begin_step(self, chunks_B: Tensor) -> None:
        pass  # Nothing is kept from layer to layer.

    def select(self, q_BRHD: Tensor, state: LayerState, count: int) -> Tensor:
        scores = chunk_scores(q_BRHD, state.landmarks_BKND, state.chunks_B, state.outliers_BKO)
        return top_chunks(scores, count)

    def find(
        self, wanted_BKS: Tensor, buffer: ChunkBuffer, counting: Counting, in_place: bool = False
    ) -> tuple[Tensor, ReferenceFetch]:
        count_selection(counting, wanted_BKS, buffer.held_BKS, self.chunks)
        slot_BKS, missing_BKS = assign_slots(wanted_BKS, buffer.held_BKS, self.chunks)
        buffer.relabel(slot_BKS, wanted_BKS, missing_BKS)
        if history := counting.history:
            history.predicted_BKS.copy_(history.following_BKS)
            history.selected_BKS.copy_(wanted_BKS)
        fetch = ReferenceFetch(wanted_BKS, slot_BKS, missing_BKS)
        return slot_BKS.masked_fill(missing_BKS & in_place, -1), fetch

    def replace(self, buffer: ChunkBuffer, chunk_BKS: Tensor) -> ReferenceFetch:
        buffer.held_BKS.copy_(chunk_BKS)
        slot_BKS = torch.arange(chunk_BKS.shape[-1], device=chunk_BKS.device).expand_as(chunk_BKS)
        return ReferenceFetch(chunk_BKS, slot_BKS, chunk_BKS != NO_CHUNK)

    def fetch(self, host: HostStore, layer: int, fetch: ReferenceFetch, buffer: ChunkBuffer) -> None:
        records_BKSXCD = host.read(layer, fetch.chunk_BKS, self.first)
        half = buffer.records_BKSXCD.shape[3] - records_BKSXCD.shape[3]
        buffer.put(fetch.slot_BKS, records_BKSXCD, fetch.where_BKS, half)

    def attend(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, state: LayerState,
        buffer: ChunkBuffer, chosen_BKS: Tensor, slot_BKS: Tensor, host_AKNXCD: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        records = buffer.take(slot_BKS.clamp(min=0))
        if host_AKNXCD is not None:
            in_buffer_BKS = slot_BKS >= 0
            records = records.where(in_buffer_BKS[..., None, None, None], read_records(host_AKNXCD, chosen_BKS))
        chunked = torch.cat((records, state.outlier_records_BKOXCD), dim=2)
        past_BKXPD = torch.cat((chunked.transpose(2, 3).flatten(3, 4), state.window_BKXWD), dim=3)
        exists_BKN = torch.cat((chosen_BKS, state.outliers_BKO), dim=-1) != NO_CHUNK
        filled_BW = window.filled_slots(state.window_BKXWD.shape[3], state.chunks_B * self.chunk, state.length_B)
        filled_BKW = filled_BW[:, None].expand(-1, exists_BKN.shape[1], -1)
        allowed_BKP = torch.cat((exists_BKN.repeat_interleave(self.chunk, dim=-1), filled_BKW), dim=-1)
        return step_attention(q_BRHD, k_BRKD, v_BRKD, past_BKXPD, allowed_BKP)

    def commit(
        self,
        k_BKD: Tensor,
        v_BKD: Tensor,
        state: LayerState,
        host: HostStore,
        layer: int,
        commit_B: Tensor,
        flush_B: Tensor,
    ) -> None:
        record_BKXCD = window.read_chunk(state.window_BKXWD, state.chunks_B * self.chunk, self.chunk)
        host.write_chunk(layer, state.chunks_B, record_BKXCD, flush_B)
        at = (torch.arange(len(flush_B), device=flush_B.device), slice(None), state.chunks_B)
        landmark_BKD, kept_BKD = chunk_landmarks(record_BKXCD[:, :, 0]), state.landmarks_BKND[at]
        state.landmarks_BKND[at] = torch.where(flush_B[:, None, None], landmark_BKD, kept_BKD)
        self.append(k_BKD, v_BKD, state, commit_B)

    def append(self, k_BKD: Tensor, v_BKD: Tensor, state: LayerState, commit_B: Tensor) -> None:
        window.write_token(state.window_BKXWD, state.length_B, torch.stack((k_BKD, v_BKD), dim=2), commit_B)


def count_selection(counting: Counting, chosen_BKS: Tensor, held_BKS: Tensor, chunks: int) -> None:
    """Add the counts of one layer's selection to the telemetry, before its misses are fetched."""
    selected_BK, hit_BK = (chosen_BKS != NO_CHUNK).sum(-1), count_common(chosen_BKS, held_BKS, chunks)
    compared = [torch.zeros_like(selected_BK)] * 3
    if (history := counting.history) and history.comparable:
        earlier = (history.predicted_BKS, history.selected_BKS)
        compared = [*(count_common(chosen_BKS, sets_BKS, chunks) for sets_BKS in earlier), selected_BK]
    prefetched_BK = (held_BKS != NO_CHUNK).sum(-1)
    counts_FBK = torch.stack((selected_BK, hit_BK, selected_BK - hit_BK, prefetched_BK, *compared))
    counting.counts_F.add_((counts_FBK * counting.commit_B[:, None]).sum(dim=(1, 2)))
