"""From the last row's logits to the next step's exact tokens: mean over the group, top S, marks.

The sum over a group's query heads of ``2^(logit - logsumexp)`` orders like the mean. The logsumexps are joined from the
splits of the attention. The exact top S is ``dualdecoder.kernels.top``'s, fed with the logarithms of these sums as the
logits of one head without a normaliser: the search for the cut is quick for numbers that are spread like logits.
Replaces ``specache.ReferenceOps._last_row`` (with ``lowbit_attention``) and a part of its ``choose``.
Suffixes: B sequences, H query heads, K KV heads, G = H / K, T tokens, S chosen tokens, Z splits, M padded query rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.kernels.scores import ScoreWorkspace, row_length
from dualdecoder.kernels.sparse_attention import SparseAttentionWorkspace
from dualdecoder.kernels.top import TopWorkspace, select_top
from dualdecoder.ledger import Ledger

KEY_TOKENS = 1024
# Tokens of one program of the selection: at batch 1 and 128K tokens, 128 programs.
SEGMENT = 8192
# Below any sum that matters: tokens with less are equal, and the lower position goes first.
TINY = tl.constexpr(1e-37)


@dataclass(frozen=True)
class ChoiceWorkspace:
    """Keys and sets of one layer; serves all layers, but not two choices at a time."""

    keys: ScoreWorkspace
    top: TopWorkspace
    sets_BRKS: Tensor

    @classmethod
    def allocate(cls, ledger: Ledger, batch: int, kv_heads: int, tokens: int, count: int) -> ChoiceWorkspace:
        """For ``count`` of ``tokens`` tokens, booked under ``workspace``."""
        heads, length = batch * kv_heads, row_length(tokens)
        keys = ledger.on_device("workspace", (heads * length,), torch.float32)
        # One span a row, whose logsumexp is that of a key alone: 0.
        scores = ScoreWorkspace(keys, ledger.on_device("workspace", (heads,), torch.float32), length)
        top = TopWorkspace.allocate(ledger, heads, tokens, count, SEGMENT)
        return cls(scores, top, ledger.on_device("workspace", (batch, 1, kv_heads, count), torch.int64))


@triton.jit
def _keys_kernel(
    logits_ptr, peak_ptr, total_ptr, keys_ptr, length, keys_length, first_row, G: tl.constexpr, GP: tl.constexpr,
    M: tl.constexpr, Z: tl.constexpr, ZP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    g_1G, real_1G = tl.arange(0, GP)[None, :], (tl.arange(0, GP) < G)[None, :]
    z_Z1, t = tl.arange(0, ZP)[:, None], tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at_ZG = (head * Z + z_Z1) * M + first_row + g_1G
    peak_ZG = tl.load(peak_ptr + at_ZG, mask=(z_Z1 < Z) & real_1G, other=float("-inf"))
    total_ZG = tl.load(total_ptr + at_ZG, mask=(z_Z1 < Z) & real_1G, other=0.0)
    # Every row sees at least itself, so the highest peak of a real one is finite.
    peak_G = tl.where(tl.arange(0, GP) < G, tl.max(peak_ZG, axis=0), 0.0)
    total_G = tl.sum(total_ZG * tl.exp2(peak_ZG - peak_G[None, :]), axis=0)
    logsumexp_G = peak_G + tl.log2(tl.where(tl.arange(0, GP) < G, total_G, 1.0))
    at_TG = (head * length + t)[:, None] * G + g_1G
    logit_TG = tl.load(logits_ptr + at_TG, mask=(t < length)[:, None] & real_1G, other=float("-inf"))
    sum_T = tl.sum(tl.exp2(logit_TG - logsumexp_G[None, :]), axis=1)
    tl.store(keys_ptr + head * keys_length + t, tl.log2(tl.maximum(sum_T, TINY)), mask=t < length)


@triton.jit
def _remember_kernel(
    sets_ptr, chosen_ptr, marked_ptr, exact_from_ptr, chooses_ptr, tokens, K: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b = head // K
    if tl.load(chooses_ptr + b):
        s = tl.arange(0, SP)
        marked_ptr += head * tokens
        old_S = tl.load(chosen_ptr + head * S + s, mask=s < S, other=-1)
        new_S = tl.load(sets_ptr + head * S + s, mask=s < S, other=-1)
        new_S = tl.where(new_S < tl.load(exact_from_ptr + b), new_S, -1)
        tl.store(marked_ptr + old_S, tl.zeros((SP,), tl.int8), mask=old_S >= 0)
        # A token may be in both sets.
        tl.debug_barrier()
        tl.store(marked_ptr + new_S, tl.full((SP,), 1, tl.int8), mask=new_S >= 0)
        tl.store(chosen_ptr + head * S + s, new_S, mask=s < S)


def choose_tokens(
    logits_BKTG: Tensor,
    attention: SparseAttentionWorkspace,
    rows: int,
    candidates_B: Tensor,
    exact_from_B: Tensor,
    chooses_B: Tensor,
    workspace: ChoiceWorkspace,
    chosen_BKS: Tensor,
    marked_BKT: Tensor,
) -> None:
    """Replace ``chosen_BKS`` (int64) and its marks (int8) where ``chooses_B`` (bool) holds.

    logits_BKTG and attention: as ``lowbit_attention`` of ``rows`` rows left them. Chosen are, of the first
    ``candidates_B`` (int64) positions, the S with the highest mean probability of the last row, ascending, ties to the
    lower one; -1 for those from ``exact_from_B`` (int64) on and for places without a candidate.
    """
    (batch, kv_heads, count), (tokens, group) = chosen_BKS.shape, logits_BKTG.shape[2:]
    splits = attention.splits
    _keys_kernel[(triton.cdiv(tokens, KEY_TOKENS), batch * kv_heads)](
        logits_BKTG, attention.peak_BKZM, attention.total_BKZM, workspace.keys.logits, tokens, row_length(tokens),
        (rows - 1) * group, G=group, GP=triton.next_power_of_2(group), M=attention.peak_BKZM.shape[3], Z=splits,
        ZP=triton.next_power_of_2(splits), BLOCK=KEY_TOKENS, num_warps=4,
    )  # fmt: skip
    select_top(workspace.keys, candidates_B, 1, tokens, workspace.sets_BRKS, workspace.top)
    _remember_kernel[(batch * kv_heads,)](
        workspace.sets_BRKS, chosen_BKS, marked_BKT, exact_from_B, chooses_B, marked_BKT.shape[2],
        K=kv_heads, S=count, SP=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
