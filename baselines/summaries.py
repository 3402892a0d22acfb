"""Blocks of 16 tokens and the bounds of their keys: what Quest (arXiv 2406.10774) and OasisKV share.

A full block is one record per KV head, K then V. Beside it lie the elementwise smallest and largest of its rotated
keys. For a query q, ``sum_d max(q_d min_d, q_d max_d)`` is at least ``q . k`` for every key k of the block: its score.
The tokens that do not fill a block yet are the tail, which is always attended to. It needs no bounds, so a block gets
its bounds once, with its last token, instead of an update with every token.
Suffixes: A sequences of a store, B sequences, R rows, T prompt tokens, H query heads, K KV heads, D head size,
N blocks, S listed blocks, V slots of a store, C = 16 tokens of a block, X = K and V, Y = smallest and largest key,
P past tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dualdecoder import window
from dualdecoder.attention import step_attention
from dualdecoder.config import MethodConfig
from dualdecoder.errors import require
from dualdecoder.landmarks import NO_CHUNK, top_chunks

BLOCK = 16


@dataclass(frozen=True)
class BlockConfig(MethodConfig):
    """Settings of a method that attends to chosen blocks and the last one.

    budget: tokens that the real row attends to at most, itself and the last, unfinished block included; a multiple of
        16. The default equals what DualDecoder and ShadowKV attend to with their 2,048 selected tokens.
    """

    budget: int = 2464

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.budget >= 2 * BLOCK and self.budget % BLOCK == 0
        require(ok, "budget", self.budget, f"a multiple of {BLOCK} tokens, at least {2 * BLOCK}")

    @property
    def blocks(self) -> int:
        """Chosen blocks per KV head, the last one not counted (S)."""
        return self.budget // BLOCK - 1

    @property
    def attended_tokens(self) -> int:
        """Most tokens that the real row attends to."""
        return self.budget


@dataclass(frozen=True)
class BlockState:
    """What a layer keeps on the device for all its tokens: bounds of the full blocks, and the tail.

    Position ``p`` of the tail lies in place ``p % C``.
    """

    bounds_BKNYD: Tensor
    tail_BKXCD: Tensor


@dataclass(frozen=True)
class Listed:
    """Blocks to attend to: numbers (``NO_CHUNK`` for none), and the slots of the store that hold them.

    number_BKS: int64, any stride between sequences. slot_BKS: int32; any value where there is no block.
    """

    records_BKVXCD: Tensor
    slot_BKS: Tensor
    number_BKS: Tensor


@dataclass(frozen=True)
class Lengths:
    """Tokens of each sequence, int64, updated in place by the method.

    length_B: tokens so far. start_B: of those, tokens in full blocks.
    """

    length_B: Tensor
    start_B: Tensor


class BlockOps(Protocol):
    """Operations of one layer; outputs may live in workspaces that the next call overwrites."""

    def select(self, q_BRHD: Tensor, state: BlockState, blocks_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` best of the first ``blocks_B`` blocks for one row, ``[B, K, S]``, and the scores ``[B, K, *]``.

        Numbers ascend; ties go to the lower one. Only the scores of blocks that exist mean anything.
        """

    def slots(self, number_BKS: Tensor) -> Tensor:
        """Block numbers as slots of a store that holds every block in its own slot."""

    def attend(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, listed: Listed, state: BlockState, lengths: Lengths
    ) -> Tensor:
        """Attention to the listed blocks, the tail and, causally, the rows themselves; ``[B, R, H, D]``."""

    def append(
        self, k_BKD: Tensor, v_BKD: Tensor, state: BlockState, records_AKNXCD: Tensor, lengths: Lengths,
        commit_B: Tensor,
    ) -> None:  # fmt: skip
        """Add one token where ``commit_B`` holds. A block that it fills goes to the store, with its bounds."""


class ReferenceBlockOps:
    """PyTorch on any device that can index the store directly."""

    def select(self, q_BRHD: Tensor, state: BlockState, blocks_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        scores_BKN = bound_scores(q_BRHD, state.bounds_BKNYD, blocks_B)[:, 0]
        return top_chunks(scores_BKN, count), scores_BKN

    def slots(self, number_BKS: Tensor) -> Tensor:
        return number_BKS

    def attend(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, listed: Listed, state: BlockState, lengths: Lengths
    ) -> Tensor:
        index_BKS = listed.slot_BKS.long().clamp(min=0)
        records = listed.records_BKVXCD
        chosen = records.gather(2, index_BKS[..., None, None, None].expand(*index_BKS.shape, *records.shape[3:]))
        past_BKXPD = torch.cat((chosen.transpose(2, 3).flatten(3, 4), state.tail_BKXCD), dim=3)
        exists_BKS = (listed.number_BKS != NO_CHUNK).repeat_interleave(BLOCK, dim=-1)
        filled_BC = window.filled_slots(BLOCK, lengths.start_B, lengths.length_B)
        filled_BKC = filled_BC[:, None].expand(-1, exists_BKS.shape[1], -1)
        return step_attention(q_BRHD, k_BRKD, v_BRKD, past_BKXPD, torch.cat((exists_BKS, filled_BKC), dim=-1))

    def append(
        self, k_BKD: Tensor, v_BKD: Tensor, state: BlockState, records_AKNXCD: Tensor, lengths: Lengths,
        commit_B: Tensor,
    ) -> None:  # fmt: skip
        window.write_token(state.tail_BKXCD, lengths.length_B, torch.stack((k_BKD, v_BKD), dim=2), commit_B)
        full_B = commit_B & (lengths.length_B % BLOCK == BLOCK - 1)
        # A sequence that has ended may stand at the end of its capacity.
        block_B = (lengths.length_B // BLOCK).clamp(max=records_AKNXCD.shape[2] - 1)
        _write_block(records_AKNXCD, block_B, state.tail_BKXCD, full_B)
        _write_block(state.bounds_BKNYD, block_B, key_bounds(state.tail_BKXCD[:, :, 0]), full_B)


def _write_block(table: Tensor, block_B: Tensor, entry_BK: Tensor, where_B: Tensor) -> None:
    """Set entries of a table ``[A, K, N, ...]``; sequence b uses row b modulo A."""
    at = (torch.arange(len(block_B), device=block_B.device) % len(table), slice(None), block_B)
    where = where_B.view(-1, *[1] * (entry_BK.dim() - 1))
    table[at] = torch.where(where, entry_BK, table[at])


def key_bounds(keys: Tensor) -> Tensor:
    """Elementwise smallest and largest key of each block, ``[..., 2, D]``, of keys ``[..., C, D]``."""
    return torch.stack((keys.amin(dim=-2), keys.amax(dim=-2)), dim=-2)


def bound_scores(q_BRHD: Tensor, bounds_BKNYD: Tensor, blocks_B: Tensor) -> Tensor:
    """Score of every block for every row, ``[B, R, K, N]`` fp32: the sum of the bounds of the group's query heads.

    As large as the sum of their products with any key of the block. ``baselines/quest.py`` says why the sum.
    The bound is a product of twice the head size: the smallest key with the negative part of the query, the largest
    with the positive part. Blocks from ``blocks_B`` on do not exist and score -inf.
    """
    rows, heads, blocks = q_BRHD.shape[1], bounds_BKNYD.shape[1], bounds_BKNYD.shape[2]
    q_BKMD = q_BRHD.float().unflatten(2, (heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # M = rows * group
    parts_BKME = torch.cat((q_BKMD.clamp(max=0), q_BKMD.clamp(min=0)), dim=-1)
    scores_BKMN = parts_BKME @ bounds_BKNYD.float().flatten(3).mT
    scores_BRKN = scores_BKMN.unflatten(2, (rows, -1)).sum(dim=3).transpose(1, 2)
    beyond_BN = torch.arange(blocks, device=blocks_B.device) >= blocks_B[:, None]
    return scores_BRKN.masked_fill(beyond_BN[:, None, None], -torch.inf)


def split_prompt(k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """A prompt's full blocks ``[K, N, 2, C, D]`` and its tail ``[K, 2, <C, D]``."""
    blocks = len(k_TKD) // BLOCK
    kv_KXTD = torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3)
    in_blocks, tail_KXTD = kv_KXTD.tensor_split((blocks * BLOCK,), dim=2)
    return in_blocks.unflatten(2, (blocks, BLOCK)).transpose(1, 2), tail_KXTD
