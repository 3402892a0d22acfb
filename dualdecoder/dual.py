"""The DualDecoder method (arXiv 2607.26475, sections 4, 5): select, fetch what is missing, attend, predict, prefetch.

Row 0 of a step is the real token, row 1 its speculated successor. Row 1's selection is the prefetch list of the next
step. Prediction, buffers and order of transfers change time, never row 0's result: attention walks the true selection
in selection order, wherever its chunks lie.
This is the reference form: transfers happen at once, in the order in which streams would carry them.
Suffixes: B sequences, R rows, T tokens, H query heads, K KV heads, D head size, N chunks, S selected chunks,
O outlier chunks, C tokens of a chunk, W tokens of the window, X = K and V, P past tokens attended to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dualdecoder.attention import step_attention
from dualdecoder.buffers import ChunkBuffer, assign_slots
from dualdecoder.config import DualDecoderConfig
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import NO_CHUNK, chunk_landmarks, chunk_scores, count_common, outlier_chunks, top_chunks
from dualdecoder.method import KVMethod
from dualdecoder.telemetry import Telemetry
from dualdecoder.window import RecentWindow

# Prefetch distance in layers: with two buffers, the one that layer l frees is next used by layer l + 2.
BUFFERS = 2

# (layer, scores of the last row [B, K, N]) -> chunk numbers [B, K, S] to expect in the next step.
Predictor = Callable[[int, Tensor], Tensor]


class DualDecoder(KVMethod):
    """Full KV on the host; landmarks, outliers, recent window and two chunk buffers on the device."""

    config_class = DualDecoderConfig
    config: DualDecoderConfig

    def allocate(self) -> None:
        model, config = self.model, self.config
        require(model.layers >= BUFFERS, "model.layers", model.layers, f"at least {BUFFERS} for alternating buffers")
        self.speculation = config.speculation
        self.rows = 1 if config.speculation == "none" else 2
        self.prefetches = self.rows == 2 and config.schedule == "layer_aware"
        self.predictor: Predictor = lambda _, scores_BKN: top_chunks(scores_BKN, self.slots)
        self.chunks = math.ceil(self.context / config.chunk)
        self.slots = min(config.budget // config.chunk, self.chunks)
        self.turn = 0
        self.full_step = self.comparable = False
        self._allocate_host_and_records()
        self._allocate_tables()

    def _allocate_host_and_records(self) -> None:
        model, ledger, chunk = self.model, self.ledger, self.config.chunk
        outliers = min(self.config.outliers, self.chunks)
        self.host = HostStore(model, self.batch, self.chunks, chunk, self.dtype, ledger)
        self.window = RecentWindow(model, self.batch, self.config.window, self.dtype, ledger)
        self.buffers = [
            ChunkBuffer.allocate(model, self.batch, self.slots, chunk, self.dtype, ledger) for _ in range(BUFFERS)
        ]
        head = (self.batch, model.kv_heads)
        landmarks, records = (*head, self.chunks, model.head_dim), (*head, outliers, 2, chunk, model.head_dim)
        self.landmarks = [ledger.on_device("landmarks", landmarks, self.dtype) for _ in range(model.layers)]
        self.outlier_records = [ledger.on_device("outliers", records, self.dtype) for _ in range(model.layers)]
        self.outliers = self._chunk_tables(outliers)

    def _allocate_tables(self) -> None:
        self.predicted = self._chunk_tables(self.slots)
        self.selected = self._chunk_tables(self.slots)
        self.telemetry = Telemetry(self.model.layers, self.ledger)
        self.length_B = self.ledger.on_device("tables", (self.batch,), torch.int64)
        self.chunks_B = self.ledger.on_device("tables", (self.batch,), torch.int64)

    def _chunk_tables(self, entries: int) -> list[Tensor]:
        shape = (self.batch, self.model.kv_heads, entries)
        tables = [self.ledger.on_device("tables", shape, torch.int64) for _ in range(self.model.layers)]
        return [table.fill_(NO_CHUNK) for table in tables]

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """Chunks to the host with landmarks and outliers; the local window and the tail stay on the device."""
        tokens, chunk = len(k_TKD), self.config.chunk
        chunks = max(0, (tokens - self.config.local) // chunk)
        kv_KXTD = torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3)
        if chunks:
            records_KXNCD = kv_KXTD[:, :, : chunks * chunk].unflatten(2, (chunks, chunk))
            self._keep_chunks(sequence, layer, records_KXNCD.transpose(1, 2))
        self.window.write_prompt(layer, sequence, chunks * chunk, kv_KXTD[:, :, chunks * chunk :])
        self.length_B[sequence], self.chunks_B[sequence] = tokens, chunks

    def _keep_chunks(self, sequence: int, layer: int, records_KNXCD: Tensor) -> None:
        self.host.write_prompt(layer, sequence, records_KNXCD)
        landmarks_KND = chunk_landmarks(records_KNXCD[:, :, 0])
        self.landmarks[layer][sequence, :, : landmarks_KND.shape[1]] = landmarks_KND
        outlier_KO = outlier_chunks(records_KNXCD[:, :, 0], landmarks_KND, self.outliers[layer].shape[-1])
        self.outliers[layer][sequence] = outlier_KO
        head_K1 = torch.arange(len(outlier_KO), device=outlier_KO.device)[:, None]
        self.outlier_records[layer][sequence] = records_KNXCD[head_K1, outlier_KO.clamp(min=0)]

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        # A single-row step before dual-row decoding runs the same token again: comparing with it would flatter.
        self.comparable, self.full_step = self.full_step, rows == self.rows
        self.commit_B = commit_B
        self.flush_B = commit_B & (self.length_B - self.chunks_B * self.config.chunk == self.config.window)

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        scores_BRKN = chunk_scores(q_BRHD, self.landmarks[layer], self.chunks_B, self.outliers[layer])
        chosen_BKS = top_chunks(scores_BRKN[:, 0], self.slots)
        slot_BKS = self._bring_in(layer, chosen_BKS)
        o_BRHD = step_attention(q_BRHD, k_BRKD, v_BRKD, *self._past(layer, chosen_BKS, slot_BKS))
        self._commit(layer, torch.stack((k_BRKD[:, 0], v_BRKD[:, 0]), dim=2))
        self.selected[layer].copy_(chosen_BKS)
        if self.prefetches:
            self.predicted[layer].copy_(self.predictor(layer, scores_BRKN[:, -1]))
        self._hand_over_buffer(layer)
        return o_BRHD

    def end_step(self) -> None:
        self.length_B += self.commit_B
        self.chunks_B += self.flush_B

    @property
    def _buffer(self) -> ChunkBuffer:
        return self.buffers[self.turn % BUFFERS]

    def _bring_in(self, layer: int, chosen_BKS: Tensor) -> Tensor:
        """Fetch the chosen chunks that the buffer lacks (urgent path); returns each chosen chunk's slot."""
        slot_BKS, missing_BKS = assign_slots(chosen_BKS, self._buffer.held_BKS, self.chunks)
        self._count(layer, chosen_BKS, missing_BKS)
        self._buffer.put(slot_BKS, chosen_BKS, self.host.read(layer, chosen_BKS), missing_BKS)
        return slot_BKS

    def _count(self, layer: int, chosen_BKS: Tensor, missing_BKS: Tensor) -> None:
        selected_BK, urgent_BK = (chosen_BKS != NO_CHUNK).sum(-1), missing_BKS.sum(-1)
        counts = {"selected": selected_BK, "urgent": urgent_BK, "hit": selected_BK - urgent_BK}
        if self.comparable:
            counts["comparable"] = selected_BK
            counts["predicted"] = count_common(chosen_BKS, self.predicted[layer], self.chunks)
            counts["reused"] = count_common(chosen_BKS, self.selected[layer], self.chunks)
        self.telemetry.add(layer, self.commit_B, **counts)

    def _past(self, layer: int, chosen_BKS: Tensor, slot_BKS: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, K, 2, P, D]`` outside this step, and which of them are real, ``[B, K, P]``."""
        chunk, heads = self.config.chunk, self.model.kv_heads
        gathered = (self._buffer.take(slot_BKS), self.outlier_records[layer])
        past = [records.transpose(2, 3).flatten(3, 4) for records in gathered]
        exists_BKN = torch.cat((chosen_BKS, self.outliers[layer]), dim=-1) != NO_CHUNK
        filled_BKW = self.window.filled(self.chunks_B * chunk, self.length_B)[:, None].expand(-1, heads, -1)
        allowed_BKP = torch.cat((exists_BKN.repeat_interleave(chunk, dim=-1), filled_BKW), dim=-1)
        return torch.cat((*past, self.window.layers[layer]), dim=3), allowed_BKP

    def _commit(self, layer: int, kv_BKXD: Tensor) -> None:
        """Move the oldest chunk of a full window to the host, then write row 0's key and value."""
        chunk = self.config.chunk
        record_BKXCD = self.window.chunk(layer, self.chunks_B * chunk, chunk)
        self.host.write_chunk(layer, self.chunks_B, record_BKXCD, self.flush_B)
        at = (torch.arange(self.batch, device=self.chunks_B.device), slice(None), self.chunks_B)
        landmark_BKD, kept_BKD = chunk_landmarks(record_BKXCD[:, :, 0]), self.landmarks[layer][at]
        self.landmarks[layer][at] = torch.where(self.flush_B[:, None, None], landmark_BKD, kept_BKD)
        self.window.write_token(layer, self.length_B, kv_BKXD, self.commit_B)

    def _hand_over_buffer(self, layer: int) -> None:
        """Fill the buffer that this layer has done with for the layer that uses it next, or empty it."""
        target = (layer + BUFFERS) % self.model.layers
        chunk_BKS = self.predicted[target]
        if self.prefetches:
            self.telemetry.add(target, self.commit_B, prefetched=(chunk_BKS != NO_CHUNK).sum(-1))
            self._buffer.replace(chunk_BKS, self.host.read(target, chunk_BKS))
        else:
            self._buffer.clear()
        self.turn += 1

    def statistics(self) -> dict[str, float]:
        """Chunk counts, link bytes, and shares of the selection: ``hit_rate``, ``kv_accuracy``, ``reuse``."""
        counts = self.telemetry.totals()
        record = self.host.record_bytes
        return {
            **counts,
            "urgent_bytes": counts["urgent"] * record,
            "prefetched_bytes": counts["prefetched"] * record,
            "hit_rate": _share(counts["hit"], counts["selected"]),
            "kv_accuracy": _share(counts["predicted"], counts["comparable"]),
            "reuse": _share(counts["reused"], counts["comparable"]),
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
