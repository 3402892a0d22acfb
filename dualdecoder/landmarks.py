"""Chunk landmarks, outlier chunks, chunk scores and exact top-S selection (as in ShadowKV, arXiv 2410.21465).

Suffixes: B sequences, R rows, T tokens, H query heads, K KV heads, D head size, N chunks, C tokens of a chunk,
S selected chunks, O outlier chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Fills the places of a selection for which there is no chunk.
NO_CHUNK = -1


def chunk_landmarks(k_KNCD: Tensor) -> Tensor:
    """Mean of each chunk's rotated keys, ``[K, N, D]``, in the keys' dtype."""
    return k_KNCD.float().mean(dim=-2).to(k_KNCD.dtype)


def outlier_chunks(k_KNCD: Tensor, landmarks_KND: Tensor, count: int) -> Tensor:
    """Per KV head the ``count`` chunks whose worst key agrees least with the landmark, ``[K, count]`` int64.

    A landmark says little about a chunk that holds a key pointing elsewhere; such chunks are always attended.
    """
    similarity_KNC = F.cosine_similarity(k_KNCD.float(), landmarks_KND.float().unsqueeze(-2), dim=-1)
    return top_chunks(-similarity_KNC.amin(dim=-1), count)


def chunk_scores(q_BRHD: Tensor, landmarks_BKND: Tensor, chunks_B: Tensor, excluded_BKO: Tensor) -> Tensor:
    """Score of every chunk for every row, ``[B, R, K, N]`` fp32: softmax over chunks, maximum over the group's heads.

    Chunks from ``chunks_B`` on do not exist yet; they and ``excluded_BKO`` (chunk numbers, may hold ``NO_CHUNK``)
    take no part in the softmax and score -inf.
    """
    heads, rows = landmarks_BKND.shape[1], q_BRHD.shape[1]
    q_BKMD = q_BRHD.unflatten(2, (heads, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # M = rows * group
    logits_BKMN = (q_BKMD @ landmarks_BKND.transpose(-1, -2)).float() * q_BRHD.shape[-1] ** -0.5
    blocked_BKN = _blocked(chunks_B, excluded_BKO, landmarks_BKND.shape[2])
    probability_BKMN = logits_BKMN.masked_fill(blocked_BKN.unsqueeze(2), -torch.inf).softmax(dim=-1)
    scores_BKRN = probability_BKMN.unflatten(2, (rows, -1)).amax(dim=3)
    return scores_BKRN.masked_fill(blocked_BKN.unsqueeze(2), -torch.inf).transpose(1, 2)


def _blocked(chunks_B: Tensor, excluded_BKO: Tensor, chunks: int) -> Tensor:
    beyond_BN = torch.arange(chunks, device=chunks_B.device) >= chunks_B[:, None]
    excluded_BKN = mark_chunks(excluded_BKO, chunks)[..., :chunks]
    return beyond_BN.unsqueeze(1) | excluded_BKN


def top_chunks(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best chunks of the last dimension in ascending chunk number, int64; ties go to the lower number.

    Places without a candidate (score -inf, or fewer chunks than ``count``) come last and hold ``NO_CHUNK``.
    """
    beyond = scores.shape[-1]
    ordered, chunk = scores.sort(dim=-1, descending=True, stable=True)
    best = chunk[..., :count].masked_fill(ordered[..., :count] == -torch.inf, beyond)
    ascending = F.pad(best, (0, count - best.shape[-1]), value=beyond).sort(dim=-1).values
    return ascending.masked_fill(ascending == beyond, NO_CHUNK)


def mark_chunks(chunk_BKS: Tensor, chunks: int) -> Tensor:
    """Bool ``[B, K, chunks + 1]``, true at the listed chunk numbers; the last column takes the ``NO_CHUNK`` entries."""
    marked = torch.zeros((*chunk_BKS.shape[:-1], chunks + 1), dtype=torch.bool, device=chunk_BKS.device)
    return marked.scatter_(-1, or_spare(chunk_BKS, chunks), True)


def or_spare(chunk_BKS: Tensor, chunks: int) -> Tensor:
    """Chunk numbers with ``NO_CHUNK`` replaced by the spare column ``chunks``."""
    return chunk_BKS.where(chunk_BKS != NO_CHUNK, chunks)


def count_common(left_BKS: Tensor, right_BKS: Tensor, chunks: int) -> Tensor:
    """How many chunks two selections share, ``[B, K]``."""
    common_BKS = mark_chunks(left_BKS, chunks).gather(-1, or_spare(right_BKS, chunks)) & (right_BKS != NO_CHUNK)
    return common_BKS.sum(dim=-1)
