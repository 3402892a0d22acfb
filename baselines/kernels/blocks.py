"""The operations of one layer's blocks in Triton, with the meaning of ``baselines.summaries.BlockOps``.

Selection and attention are DualDecoder's kernels. ``select_top`` reads the block scores as logits of groups of one with
logsumexp 0; ``sparse_attention`` walks the listed blocks as chunks, the tail as a window of one block, no outliers.
All outputs are allocated once, so that a step can be captured in a CUDA graph.
Suffixes: as in ``baselines/summaries.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
from torch import Tensor

from baselines.kernels.append import append_token
from baselines.kernels.bounds import score_bounds
from baselines.summaries import BLOCK, BlockState, Lengths, Listed
from dualdecoder.config import ModelConfig
from dualdecoder.errors import require
from dualdecoder.kernels.scores import ScoreWorkspace, row_length
from dualdecoder.kernels.sparse_attention import DEFAULT_TUNING, Places, SparseAttentionWorkspace, sparse_attention
from dualdecoder.kernels.top import MAX_COUNT, TopWorkspace, select_top
from dualdecoder.ledger import Ledger

# Shared memory holds three attention programs a multiprocessor: as many as run at once on an H200.
PROGRAMS_AT_ONCE = 3 * 132
# Tiles that a split walks at least: with fewer, merging the partial results costs more than it saves.
FEWEST_TILES = 4


class TritonBlockOps:
    """Kernels and their workspaces for one method instance.

    listed: lengths of the lists to attend to. aside: ``select`` runs on a stream beside other kernels.
    """

    def __init__(
        self, model: ModelConfig, *, batch: int, rows: int, chunks: int, slots: int, listed: Iterable[int],
        aside: bool, dtype: torch.dtype, ledger: Ledger,
    ) -> None:  # fmt: skip
        require(slots <= MAX_COUNT, "budget", (slots + 1) * BLOCK, f"at most {(MAX_COUNT + 1) * BLOCK} tokens on a GPU")
        heads, head_dim = (batch, model.kv_heads), model.head_dim
        self.chunks = chunks
        self.scores_BKRN = ledger.on_device("workspace", (*heads, 1, row_length(chunks)), torch.float32)
        no_logsumexp = ledger.on_device("workspace", (batch * model.kv_heads,), torch.float32)
        self.keys = ScoreWorkspace(self.scores_BKRN.flatten(), no_logsumexp, row_length(chunks))
        self.top_workspace = TopWorkspace.allocate(ledger, batch * model.kv_heads, chunks, slots, shared=aside)
        self.chosen_BRKS = ledger.on_device("workspace", (batch, 1, model.kv_heads, slots), torch.int64)
        self.slot_BKS = ledger.on_device("workspace", (*heads, slots), torch.int32)
        self.output = ledger.on_device("workspace", (batch * rows * model.query_heads * head_dim,), dtype)
        self.attention = {
            count: SparseAttentionWorkspace.allocate(
                ledger, *heads, head_dim, (count + 1) * BLOCK, wanted_splits(batch * model.kv_heads, count)
            )
            for count in sorted(listed)
        }
        self.no_records = ledger.on_device("workspace", (*heads, 0, 2, BLOCK, head_dim), dtype)
        self.no_numbers = ledger.on_device("workspace", (*heads, 0), torch.int64)

    def select(self, q_BRHD: Tensor, state: BlockState, blocks_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        assert q_BRHD.shape[1] == 1 and count == self.chosen_BRKS.shape[-1]
        score_bounds(q_BRHD, state.bounds_BKNYD, blocks_B, self.scores_BKRN)
        select_top(self.keys, blocks_B, 1, self.chunks, self.chosen_BRKS, self.top_workspace)
        return self.chosen_BRKS[:, 0], self.scores_BKRN[:, :, 0]

    def slots(self, number_BKS: Tensor) -> Tensor:
        return self.slot_BKS.copy_(number_BKS)

    def attend(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, listed: Listed, state: BlockState, lengths: Lengths
    ) -> Tensor:
        places = Places(
            listed.records_BKVXCD, listed.slot_BKS, listed.number_BKS, self.no_records, self.no_numbers,
            state.tail_BKXCD, lengths.start_B, lengths.length_B,
        )  # fmt: skip
        workspace = self.attention[listed.number_BKS.shape[-1]]
        o_BRHD = self.output[: q_BRHD.numel()].view(q_BRHD.shape)
        return sparse_attention(q_BRHD, k_BRKD, v_BRKD, places, workspace, o_BRHD)

    def append(
        self, k_BKD: Tensor, v_BKD: Tensor, state: BlockState, records_AKNXCD: Tensor, lengths: Lengths,
        commit_B: Tensor,
    ) -> None:  # fmt: skip
        append_token(
            state.tail_BKXCD, records_AKNXCD, state.bounds_BKNYD, k_BKD, v_BKD, lengths.length_B, commit_B
        )  # fmt: skip


def wanted_splits(heads: int, blocks: int) -> int | None:
    """Splits a head of a list of ``blocks``: one wave of programs for long lists, the kernel's own choice for short."""
    tiles = triton.cdiv((blocks + 1) * BLOCK, DEFAULT_TUNING.tile_tokens)
    splits = min(PROGRAMS_AT_ONCE // heads, tiles // FEWEST_TILES)
    return splits if splits > 16 else None
