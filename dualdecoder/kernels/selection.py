"""The selection of a whole batch: landmark scores (scores.py) and top-S (top.py), a large one in two halves.

Reading landmarks keeps the memory busy and the multiprocessors idle, searching the top is the other way round. So
each half of a large batch has a stream: while the top of the one is sought, the landmarks of the other are read.
Smaller pieces lose more where kernels begin and end than they gain; so do halves of a small batch. The experiment
kernel_time measures a selection beside the same batch in one piece.
Suffixes: B sequences, R rows, H query heads, K KV heads, D head size, N chunks, S selected chunks, O outlier chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.kernels.scores import ScoreWorkspace, row_length, score_chunks
from dualdecoder.kernels.top import TopWorkspace, select_top
from dualdecoder.ledger import Ledger
from dualdecoder.ops import LayerState
from dualdecoder.transfer import SideStream

# From 12 sequences of 8B shapes at 128K on, two halves are worth their streams.
HALVED_LOGITS = 12 * 2**20


@dataclass(frozen=True)
class _Part:
    """A part of the batch, and the workspaces to select for it."""

    sequences: slice
    scores: ScoreWorkspace
    top: TopWorkspace

    def select(self, q_BRHD: Tensor, state: LayerState, sets_BRKS: Tensor) -> None:
        landmarks_BKND, chunks_B = state.landmarks_BKND[self.sequences], state.chunks_B[self.sequences]
        group, chunks = q_BRHD.shape[2] // landmarks_BKND.shape[1], landmarks_BKND.shape[2]
        excluded_BKO = state.outliers_BKO[self.sequences]
        score_chunks(q_BRHD[self.sequences], landmarks_BKND, chunks_B, excluded_BKO, self.scores)
        select_top(self.scores, chunks_B, group, chunks, sets_BRKS[self.sequences], self.top)


class Selection:
    """Selects for batches of one size; its workspaces serve all layers."""

    def __init__(
        self, ledger: Ledger, model: ModelConfig, *, batch: int, rows: int, chunks: int, count: int,
        halved: bool | None = None,
    ) -> None:  # fmt: skip
        """``halved``: whether to use two streams; None to choose."""
        if halved is None:
            halved = batch * rows * model.query_heads * row_length(chunks) >= HALVED_LOGITS
        bounds = (0, batch - batch // 2, batch) if halved and batch > 1 else (0, batch)
        size, heads, kv_heads = bounds[1], model.query_heads, model.kv_heads
        self.parts = [
            _Part(
                slice(*ends),
                ScoreWorkspace.allocate(ledger, size, rows, heads, kv_heads, chunks),
                TopWorkspace.allocate(ledger, size * rows * kv_heads, chunks, count, shared=size < batch),
            )
            for ends in pairwise(bounds)
        ]
        self.side = SideStream(ledger.device, urgent=False)

    def __call__(self, q_BRHD: Tensor, state: LayerState, sets_BRKS: Tensor) -> Tensor:
        """Write the S best chunks of every row to ``sets_BRKS`` (int64), ascending; see ``select_top``."""
        for part in self.parts[1:]:
            with self.side.work():
                part.select(q_BRHD, state, sets_BRKS)
        self.parts[0].select(q_BRHD, state, sets_BRKS)
        self.side.wait()
        return sets_BRKS
