"""What InfiniGen does in a layer, in PyTorch: the columns, the choice, the fetch, attention.

``baselines/kernels/infinigen.py`` has the same in Triton.

Suffixes: A host sequences, B sequences, R = 1 row, T tokens of capacity, N queries of a prompt, H query heads, K KV
heads, G = H / K, D head size, J columns, S slots, P places attended to, X = K and V, C = 1 token of a record.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dualdecoder.attention import step_attention
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import NO_CHUNK


def skew(q_NGD: Tensor, k_ND: Tensor, columns: int) -> Tensor:
    """Columns ``[D, J]`` (fp32) of one KV head's orthogonal matrix that carry most of a prompt's queries and keys."""
    queries, keys = q_NGD.flatten(0, 1).float(), k_ND.float()
    matrix_DD = torch.linalg.eigh((queries.T @ queries).double()).eigenvectors.float()
    size_D = (queries @ matrix_DD).abs().mean(dim=0) + (keys @ matrix_DD).abs().mean(dim=0)
    return matrix_DD[:, size_D.topk(columns).indices]


def guessed_scores(query_BKGJ: Tensor, partial_BKTJ: Tensor, length_B: Tensor, scale: float) -> Tensor:
    """Score of every token, ``[B, K, T]`` fp32: at most 0; -inf from ``length_B`` on."""
    logits_BKGT = query_BKGJ.float() @ partial_BKTJ.float().transpose(-1, -2) * scale
    beyond_BT = torch.arange(partial_BKTJ.shape[2], device=length_B.device) >= length_B[:, None]
    logits_BKGT.masked_fill_(beyond_BT[:, None, None], -torch.inf)
    return (logits_BKGT - logits_BKGT.amax(dim=-1, keepdim=True)).amax(dim=2)


def wanted_tokens(scores_BKT: Tensor, alpha: float, cap: int) -> Tensor:
    """n of every sequence, int64 ``[B]``."""
    counted_B = ((scores_BKT > -alpha) & (scores_BKT > -torch.inf)).sum(dim=(1, 2))
    return (counted_B // scores_BKT.shape[1]).clamp(max=cap)


def top_tokens(scores_BKT: Tensor, wanted_B: Tensor, slots: int) -> Tensor:
    """The ``wanted_B`` best tokens of every KV head, best first, ``NO_CHUNK`` behind; ties go to the lower position."""
    best_BKS = scores_BKT.sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    beyond_BS = torch.arange(slots, device=wanted_B.device) >= wanted_B[:, None]
    return best_BKS.masked_fill(beyond_BS[:, None], NO_CHUNK)


class InfiniGenOps(Protocol):
    """Operations of one layer; outputs may live in workspaces that the next call overwrites."""

    def choose(
        self, query_BKGJ: Tensor, partial_BKTJ: Tensor, length_B: Tensor, wanted_B: Tensor, buffer: ChunkBuffer
    ) -> None:
        """Fill ``wanted_B`` and the buffer's table: the chosen tokens in its first slots."""

    def fetch(self, host: HostStore, layer: int, buffer: ChunkBuffer) -> None:
        """Copy the records of the tokens that the buffer's table lists; follows ``choose`` with the same buffer."""

    def load(self, host: HostStore, layer: int) -> None:
        """Copy a whole layer."""

    def attend(self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, buffer: ChunkBuffer, wanted_B: Tensor) -> Tensor:
        """Attention ``[B, R, H, D]`` to the first ``wanted_B`` slots and to the row itself."""

    def attend_to_all(self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, length_B: Tensor) -> Tensor:
        """Attention to the first ``length_B`` tokens of the loaded layer and to the row itself."""

    def append(
        self, k_BKD: Tensor, v_BKD: Tensor, host: HostStore, layer: int, partial: tuple[Tensor, Tensor] | None,
        length_B: Tensor, commit_B: Tensor,
    ) -> None:  # fmt: skip
        """Where ``commit_B``: the row's record to the host; with ``partial`` = (skew, partial keys) its columns too."""


class ReferenceOps:
    """PyTorch on any device that can index the host store directly, that is: on the CPU."""

    def __init__(self, alpha: float, cap: int) -> None:
        self.alpha, self.cap = alpha, cap

    def choose(
        self, query_BKGJ: Tensor, partial_BKTJ: Tensor, length_B: Tensor, wanted_B: Tensor, buffer: ChunkBuffer
    ) -> None:
        scale = buffer.records_BKSXCD.shape[-1] ** -0.5
        scores_BKT = guessed_scores(query_BKGJ, partial_BKTJ, length_B, scale)
        wanted_B.copy_(wanted_tokens(scores_BKT, self.alpha, self.cap))
        buffer.held_BKS.copy_(top_tokens(scores_BKT, wanted_B, buffer.held_BKS.shape[-1]))

    def fetch(self, host: HostStore, layer: int, buffer: ChunkBuffer) -> None:
        buffer.records_BKSXCD.copy_(host.read(layer, buffer.held_BKS))

    def load(self, host: HostStore, layer: int) -> None:
        self.whole_AKTXCD = host.records[layer]

    def attend(self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, buffer: ChunkBuffer, wanted_B: Tensor) -> Tensor:
        return _attend(q_BRHD, k_BRKD, v_BRKD, buffer.records_BKSXCD, wanted_B)

    def attend_to_all(self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, length_B: Tensor) -> Tensor:
        sequence_B = torch.arange(len(length_B)) % len(self.whole_AKTXCD)
        return _attend(q_BRHD, k_BRKD, v_BRKD, self.whole_AKTXCD[sequence_B], length_B)

    def append(
        self, k_BKD: Tensor, v_BKD: Tensor, host: HostStore, layer: int, partial: tuple[Tensor, Tensor] | None,
        length_B: Tensor, commit_B: Tensor,
    ) -> None:  # fmt: skip
        # A sequence that has ended may stand at the end of its capacity; its row is written nowhere.
        token_B = length_B.clamp(max=host.records[layer].shape[2] - 1)
        host.write_chunk(layer, token_B, torch.stack((k_BKD, v_BKD), dim=2)[:, :, :, None], commit_B)
        if partial is None:
            return
        skew_BKDJ, partial_BKTJ = partial
        at = (torch.arange(len(token_B)), slice(None), token_B)
        columns_BKJ = (k_BKD[:, :, None] @ skew_BKDJ)[:, :, 0]
        partial_BKTJ[at] = torch.where(commit_B[:, None, None], columns_BKJ, partial_BKTJ[at])


def _attend(q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, records_BKPXCD: Tensor, filled_B: Tensor) -> Tensor:
    past_BKXPD = records_BKPXCD.squeeze(4).transpose(2, 3)
    batch, kv_heads, _, places, _ = past_BKXPD.shape
    allowed_BP = torch.arange(places, device=filled_B.device) < filled_B[:, None]
    allowed_BKP = allowed_BP[:, None].expand(batch, kv_heads, places)
    return step_attention(q_BRHD, k_BRKD, v_BRKD, past_BKXPD, allowed_BKP)
