"""The operations of one layer in Triton, with the meaning of ``dualdecoder.ops``.

All outputs and intermediate tensors are allocated once, so that a step can be captured in a CUDA graph. Side streams
carry the fetches: each transfer that may be under way at the same time has a fetch list of its own.
Suffixes: as in ``dualdecoder/ops.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import ModelConfig
from dualdecoder.host_store import HostStore
from dualdecoder.kernels.commit import append_token, commit_step
from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.kernels.gather import gather_records
from dualdecoder.kernels.selection import Selection
from dualdecoder.kernels.slots import SlotWorkspace, assign_slots, replace_all
from dualdecoder.kernels.sparse_attention import Places, SparseAttentionWorkspace, sparse_attention
from dualdecoder.ledger import Ledger
from dualdecoder.ops import Counting, LayerState


class TritonOps:
    """Kernels and their workspaces for one method instance, or for some of its sequences.

    buffers: how many chunk buffers may be filled ahead at a time, 0 where nothing is. first: number in the host store
    of the first sequence.
    """

    def __init__(
        self, model: ModelConfig, *, batch: int, rows: int, chunk: int, chunks: int, slots: int, outliers: int,
        window: int, buffers: int, dtype: torch.dtype, ledger: Ledger, first: int = 0,
    ) -> None:  # fmt: skip
        heads, kv_heads = model.query_heads, model.kv_heads
        self.chunk, self.first = chunk, first
        self.selection = Selection(ledger, model, batch=batch, rows=rows, chunks=chunks, count=slots)
        past = (slots + outliers) * chunk + window
        self.attention_workspace = SparseAttentionWorkspace.allocate(ledger, batch, kv_heads, model.head_dim, past)
        self.sets = ledger.on_device("workspace", (batch * rows * kv_heads * slots,), torch.int64)
        self.output = ledger.on_device("workspace", (batch * rows * heads * model.head_dim,), dtype)
        self.slot_BKS = ledger.on_device("workspace", (batch, kv_heads, slots), torch.int32)
        self.start_B = ledger.on_device("workspace", (batch,), torch.int64)
        records = batch * kv_heads * slots
        entries = [ledger.on_device("workspace", (3, records), torch.int32) for _ in range(1 + buffers)]
        # Every list of a step has a counter of its own, so that one launch zeroes all of them.
        self.counters = ledger.on_device("workspace", (2, model.layers), torch.int32)
        missing, expected = (counters.split(1) for counters in self.counters)
        self.misses = [FetchList(entries[0], count) for count in missing]
        # The list of the buffer handed over before may still be in use.
        ahead = [FetchList(entries[1 + i % buffers], count) for i, count in enumerate(expected)] if buffers else []
        self.expected = ahead
        self.slot_workspace = SlotWorkspace.allocate(ledger, batch * kv_heads, chunks, slots)
        self.finds = self.replacements = 0

    def begin_step(self, chunks_B: Tensor) -> None:
        self.counters.zero_()
        torch.mul(chunks_B, self.chunk, out=self.start_B)
        self.finds = self.replacements = 0

    def select(self, q_BRHD: Tensor, state: LayerState, count: int) -> Tensor:
        shape = (*q_BRHD.shape[:2], state.landmarks_BKND.shape[1], count)
        return self.selection(q_BRHD, state, _shaped(self.sets, shape))

    def find(
        self, wanted_BKS: Tensor, buffer: ChunkBuffer, counting: Counting, in_place: bool = False
    ) -> tuple[Tensor, FetchList]:
        misses = self.misses[self.finds]
        self.finds += 1
        tables = (buffer.held_BKS, self.slot_BKS, misses, self.slot_workspace)
        assign_slots(wanted_BKS, *tables, counting, marks_missing=in_place)
        return self.slot_BKS, misses

    def replace(self, buffer: ChunkBuffer, chunk_BKS: Tensor) -> FetchList:
        expected = self.expected[self.replacements]
        self.replacements += 1
        replace_all(chunk_BKS, buffer.held_BKS, expected)
        return expected

    def fetch(self, host: HostStore, layer: int, fetch: FetchList, buffer: ChunkBuffer) -> None:
        gather_records(host.records[layer], buffer.records_BKSXCD, fetch, first=self.first)

    def attend(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, state: LayerState,
        buffer: ChunkBuffer, chosen_BKS: Tensor, slot_BKS: Tensor, host_AKNXCD: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        places = Places(
            buffer.records_BKSXCD, slot_BKS, chosen_BKS, state.outlier_records_BKOXCD, state.outliers_BKO,
            state.window_BKXWD, self.start_B, state.length_B, host_AKNXCD,
        )  # fmt: skip
        o_BRHD = _shaped(self.output, tuple(q_BRHD.shape))
        return sparse_attention(q_BRHD, k_BRKD, v_BRKD, places, self.attention_workspace, o_BRHD)

    def commit(
        self, k_BKD: Tensor, v_BKD: Tensor, state: LayerState, host: HostStore, layer: int,
        commit_B: Tensor, flush_B: Tensor,
    ) -> None:  # fmt: skip
        commit_step(
            state.window_BKXWD, host.records[layer], state.landmarks_BKND, k_BKD, v_BKD,
            self.start_B, state.length_B, flush_B, commit_B,
        )  # fmt: skip

    def append(self, k_BKD: Tensor, v_BKD: Tensor, state: LayerState, commit_B: Tensor) -> None:
        append_token(state.window_BKXWD, k_BKD, v_BKD, state.length_B, commit_B)


def _shaped(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The front of a flat workspace: a step of fewer rows than the most uses less of it."""
    count = 1
    for size in shape:
        count *= size
    return flat[:count].view(shape)
