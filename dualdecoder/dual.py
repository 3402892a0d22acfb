"""The DualDecoder method (arXiv 2607.26475, sections 4, 5): select, fetch what is missing, attend, predict, prefetch.

Row 0 of a step is the real token, row 1 its speculated successor. Row 1's selection is the prefetch list of the next
step. Prediction, buffers and order of transfers change time, never row 0's result: attention walks the true selection
in selection order, wherever its chunks lie.
On a GPU, transfers run on side streams; on a CPU they happen at once, in the same order.
Suffixes: B sequences, R rows, T tokens, H query heads, K KV heads, D head size, N chunks, S selected chunks,
O outlier chunks, C tokens of a chunk, W tokens of the window, X = K and V, P past tokens attended to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import DualDecoderConfig
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.method import Capabilities, KVMethod
from dualdecoder.ops import Counting, History, LayerState, Ops, ReferenceOps
from dualdecoder.telemetry import Telemetry, share
from dualdecoder.transfer import SideStream

# Prefetch distance in layers: with two buffers, the one that layer l frees is next used by layer l + 2.
BUFFERS = 2


class DualDecoder(KVMethod):
    """Full KV on the host; landmarks, outliers, recent window and two chunk buffers on the device."""

    config_class = DualDecoderConfig
    capabilities = Capabilities(exact=False, recalls=True, offloads=True)
    devices = ("cpu", "cuda")
    config: DualDecoderConfig

    def allocate(self) -> None:
        model, config = self.model, self.config
        require(model.layers >= BUFFERS, "model.layers", model.layers, f"at least {BUFFERS} for alternating buffers")
        self.speculation = config.speculation
        self.in_place = config.urgent == "in_place"
        self.rows = 1 if config.speculation == "none" else 2
        # With an odd number of layers the buffers swap roles between steps.
        self.graphable = model.layers % BUFFERS == 0
        self.prefetches = self.rows == 2 and config.schedule == "layer_aware"
        self.chunks = math.ceil(self.context / config.chunk)
        self.slots = min(config.budget // config.chunk, self.chunks)
        self.turn = 0
        self.full_step = self.comparable = False
        self._allocate_memory()
        self.ops = self._make_ops()
        self.urgent = SideStream(self.ledger.device, urgent=True)
        self.prefetch = SideStream(self.ledger.device, urgent=False)

    def _make_ops(self) -> Ops:
        if self.device_type != "cuda":
            return ReferenceOps(self.chunks, self.config.chunk)
        return self.triton_ops()

    def triton_ops(self) -> Ops:
        """The GPU's operations. Triton is imported only here, so that a CPU needs none."""
        from dualdecoder.kernels.ops import TritonOps

        return TritonOps(
            self.model, batch=self.batch, rows=self.rows, chunk=self.config.chunk, chunks=self.chunks,
            slots=self.slots, outliers=self.layers[0].outliers_BKO.shape[-1], window=self.config.window,
            buffers=BUFFERS, dtype=self.dtype, ledger=self.ledger,
        )  # fmt: skip

    def _allocate_memory(self) -> None:
        model, ledger, chunk = self.model, self.ledger, self.config.chunk
        self.host = HostStore(model, self.config.host_sequences or self.batch, self.chunks, chunk, self.dtype, ledger)
        self.buffers = [
            ChunkBuffer.allocate(model, self.batch, self.slots, chunk, self.dtype, ledger) for _ in range(BUFFERS)
        ]
        self.length_B = ledger.on_device("tables", (self.batch,), torch.int64)
        self.chunks_B = ledger.on_device("tables", (self.batch,), torch.int64)
        self.layers = [self._allocate_layer() for _ in range(model.layers)]
        self.predicted = [self._chunk_table(self.slots) for _ in range(model.layers)]
        self.selected = [self._chunk_table(self.slots) for _ in range(model.layers)]
        self.telemetry = Telemetry(model.layers, ledger)

    def _allocate_layer(self) -> LayerState:
        return LayerState.allocate(
            self.model, self.length_B, self.chunks_B, chunks=self.chunks, outliers=self.config.outliers,
            chunk=self.config.chunk, window=self.config.window, dtype=self.dtype, ledger=self.ledger,
        )  # fmt: skip

    def _chunk_table(self, entries: int) -> Tensor:
        shape = (self.batch, self.model.kv_heads, entries)
        return self.ledger.on_device("tables", shape, torch.int64).fill_(NO_CHUNK)

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """Chunks to the host with landmarks and outliers; the local window and the tail stay on the device."""
        tokens, chunk = len(k_TKD), self.config.chunk
        chunks = max(0, (tokens - self.config.local) // chunk)
        if chunks:
            kv_KXTD = torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3)
            records_KXNCD = kv_KXTD[:, :, : chunks * chunk].unflatten(2, (chunks, chunk))
            self._keep_chunks(sequence, layer, records_KXNCD.transpose(1, 2).contiguous())
        self.layers[layer].keep_rest(sequence, chunks * chunk, k_TKD, v_TKD)
        self.length_B[sequence], self.chunks_B[sequence] = tokens, chunks

    def _keep_chunks(self, sequence: int, layer: int, records_KNXCD: Tensor) -> None:
        with self.prefetch.work():
            self.host.write_prompt(layer, sequence, records_KNXCD)
        self.prefetch.keep_alive(records_KNXCD)
        self.layers[layer].keep_chunks(sequence, records_KNXCD)

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        # A single-row step before dual-row decoding runs the same token again: comparing with it would flatter.
        self.comparable, self.full_step = self.full_step, rows == self.rows
        self.prefetch.join()
        self.ops.begin_step(self.chunks_B)
        self.commit_B = commit_B
        self.flush_B = commit_B & (self.length_B - self.chunks_B * self.config.chunk == self.config.window)

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        state = self.layers[layer]
        chosen_BKS, predicted_BKS = self._select(layer, q_BRHD)
        slot_BKS = self._bring_in(layer, chosen_BKS, predicted_BKS)
        if self.observe and self.full_step:
            self.observe(layer, chosen_BKS, self._buffer.present(chosen_BKS, slot_BKS))
        elsewhere = self.host.records[layer] if self._reads_in_place else None
        o_BRHD = self.ops.attend(q_BRHD, k_BRKD, v_BRKD, state, self._buffer, chosen_BKS, slot_BKS, elsewhere)
        self.ops.commit(k_BRKD[:, 0], v_BRKD[:, 0], state, self.host, layer, self.commit_B, self.flush_B)
        self._hand_over_buffer(layer)
        return o_BRHD

    def end_step(self) -> None:
        self.length_B += self.commit_B
        self.chunks_B += self.flush_B
        self.prefetch.join()

    @property
    def _buffer(self) -> ChunkBuffer:
        return self.buffers[self.turn % BUFFERS]

    @property
    def _reads_in_place(self) -> bool:
        return self.transfers and self.in_place

    def _select(self, layer: int, q_BRHD: Tensor) -> tuple[Tensor, Tensor]:
        """Row 0's true set, and the last row's set: what to expect in the next step."""
        sets_BRKS = self.ops.select(q_BRHD, self.layers[layer], self.slots)
        chosen_BKS, predicted_BKS = sets_BRKS[:, 0], sets_BRKS[:, -1]
        return self.rewrite(layer, chosen_BKS, predicted_BKS) if self.rewrite else (chosen_BKS, predicted_BKS)

    def _bring_in(self, layer: int, chosen_BKS: Tensor, predicted_BKS: Tensor) -> Tensor:
        """Fetch the chosen chunks that the buffer lacks (urgent path); returns each chosen chunk's slot."""
        history = History(self.predicted[layer], self.selected[layer], predicted_BKS, self.comparable)
        counting = Counting(self.telemetry.counts[layer], self.commit_B, history)
        self.prefetch.wait(("table", self.turn % BUFFERS))
        slot_BKS, misses = self.ops.find(chosen_BKS, self._buffer, counting, self._reads_in_place)
        # A missing chunk may take the slot of a wrong prediction that is still on its way.
        self.prefetch.wait(("records", self.turn % BUFFERS))
        if self.transfers and not self.in_place:
            with self.urgent.work():
                self.ops.fetch(self.host, layer, misses, self._buffer)
            self.urgent.wait()
        return slot_BKS

    def _hand_over_buffer(self, layer: int) -> None:
        """Fill the buffer that this layer has done with for the layer that uses it next, or empty it."""
        target, turn = (layer + BUFFERS) % self.model.layers, self.turn % BUFFERS
        if self.prefetches:
            # The table, too, is nobody's concern before the buffer's next turn.
            with self.prefetch.work(("table", turn)):
                expected = self.ops.replace(self._buffer, self.predicted[target])
            if self.transfers:
                with self.prefetch.work(("records", turn), follow=False):
                    self.ops.fetch(self.host, target, expected, self._buffer)
        else:
            self._buffer.clear()
        self.turn += 1

    def read_bytes(self) -> int:
        plan = self.ledger.plan().gpu
        selected = self.buffers[0].records_BKSXCD.nbytes * self.model.layers
        return plan["landmarks"] + plan["outliers"] + plan["window"] + selected

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random records, landmarks and window; outliers spread evenly."""
        local, chunk = self.config.local, self.config.chunk
        require(local < tokens < self.context, "tokens", tokens, f"{local + 1} to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)
        chunks = (tokens - local) // chunk
        for layer, state in enumerate(self.layers):
            self.host.fill_normal(layer, generator)
            state.fill_normal(chunks, generator)
        self.length_B.fill_(tokens)
        self.chunks_B.fill_(chunks)

    def statistics(self) -> dict[str, float]:
        """Chunk counts, link bytes, and shares of the selection: ``hit_rate``, ``kv_accuracy``, ``reuse``."""
        counts = self.telemetry.totals()
        record = self.host.record_bytes
        return {
            **counts,
            "urgent_bytes": counts["urgent"] * record,
            "prefetched_bytes": counts["prefetched"] * record,
            "hit_rate": share(counts["hit"], counts["selected"]),
            "kv_accuracy": share(counts["predicted"], counts["comparable"]),
            "reuse": share(counts["reused"], counts["comparable"]),
        }
