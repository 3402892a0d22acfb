"""State and bookkeeping of the methods that attend to chosen blocks: lengths, bounds, tail.

Suffixes: as in ``baselines/summaries.py``.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from baselines.summaries import (
    BLOCK,
    BlockConfig,
    BlockOps,
    BlockState,
    Lengths,
    ReferenceBlockOps,
    key_bounds,
    split_prompt,
)
from dualdecoder import window
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.method import KVMethod


class BlockMethod(KVMethod):
    """A method with bounds of all full blocks and the tail on the device. Where the blocks lie is the subclass's part.

    chunks: blocks of the capacity. slots: chosen blocks (S). chunks_B: full blocks of each sequence.
    following_B: the same once this step's token is in.
    """

    devices = ("cpu", "cuda")
    graphable = True
    # Whether blocks are scored and selected on a stream beside the layers.
    selects_aside = False
    config: BlockConfig

    def allocate(self) -> None:
        self.chunks = math.ceil(self.context / BLOCK)
        self.slots = min(self.config.blocks, self.chunks)
        self.chunks_B, self.following_B = self._counter(), self._counter()
        self.length_B, self.start_B = self._counter(), self._counter()
        self.lengths = Lengths(self.length_B, self.start_B)
        self.layers = [self._allocate_state() for _ in range(self.model.layers)]
        self.ops = self._make_ops()

    def _counter(self) -> Tensor:
        return self.ledger.on_device("tables", (self.batch,), torch.int64)

    def _allocate_state(self) -> BlockState:
        model, head = self.model, (self.batch, self.model.kv_heads)
        return BlockState(
            self.ledger.on_device("summaries", (*head, self.chunks, 2, model.head_dim), self.dtype),
            self.ledger.on_device("window", (*head, 2, BLOCK, model.head_dim), self.dtype),
        )

    def table(self, entries: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A table of block numbers or slots for each KV head, empty."""
        shape = (self.batch, self.model.kv_heads, entries)
        return self.ledger.on_device("tables", shape, dtype).fill_(NO_CHUNK)

    def _make_ops(self) -> BlockOps:
        return self.triton_ops() if self.device_type == "cuda" else ReferenceBlockOps()

    def triton_ops(self) -> BlockOps:
        """The GPU's operations. Triton is imported only here, so that a CPU needs none."""
        from baselines.kernels.blocks import TritonBlockOps

        return TritonBlockOps(
            self.model, batch=self.batch, rows=self.rows, chunks=self.chunks, slots=self.slots,
            listed=self.listed_blocks(), aside=self.selects_aside, dtype=self.dtype, ledger=self.ledger,
        )  # fmt: skip

    def listed_blocks(self) -> set[int]:
        """Lengths of the lists that ``ops.attend`` is called with."""
        return {self.slots}

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """Full blocks to the subclass with their bounds; the tail stays beside them."""
        records_KNXCD, tail_KXTD = split_prompt(k_TKD, v_TKD)
        state, blocks = self.layers[layer], records_KNXCD.shape[1]
        window.write_prompt(state.tail_BKXCD[sequence], blocks * BLOCK, tail_KXTD)
        self.length_B[sequence], self.chunks_B[sequence] = len(k_TKD), blocks
        if blocks:
            state.bounds_BKNYD[sequence, :, :blocks] = key_bounds(records_KNXCD[:, :, 0])
        self.keep_prompt(sequence, layer, q_THD, records_KNXCD)

    @abstractmethod
    def keep_prompt(self, sequence: int, layer: int, q_THD: Tensor, records_KNXCD: Tensor) -> None:
        """Store a prompt's full blocks, which may be none."""

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        self.commit_B = commit_B
        torch.mul(self.chunks_B, BLOCK, out=self.start_B)
        torch.div(self.length_B + commit_B, BLOCK, rounding_mode="floor", out=self.following_B)

    def end_step(self) -> None:
        self.length_B += self.commit_B
        self.chunks_B.copy_(self.following_B)

    def read_bytes(self) -> int:
        head_bytes = self.model.kv_heads * 2 * self.model.head_dim * self.dtype.itemsize
        past, full = int(self.length_B.sum()), int(self.chunks_B.sum())
        chosen = int(self.chunks_B.clamp(max=self.slots).sum())
        tail = past - full * BLOCK
        scored, dense = self.scored_layers(), self.model.layers - self.scored_layers()
        return head_bytes * (scored * (full + chosen * BLOCK + tail) + dense * past)

    def scored_layers(self) -> int:
        """Layers that attend to chosen blocks only."""
        return self.model.layers
