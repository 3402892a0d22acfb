"""The loss of a step, and what the model can do: perplexity of prose, and exact recall.

Suffixes: B examples, T tokens, E width, N positions that are learnt from, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from experiments.long_context.example import ANSWER, PROSE
from experiments.long_context.mixture import Batch

# Positions of prose that a step learns from: a sample of a long text is enough, and logits of all would not fit.
MOST_PROSE = 16384
PIECE = 4096


@dataclass(frozen=True)
class Loss:
    """Mean nats a token, NaN where there is none of the kind."""

    prose: Tensor
    answer: Tensor

    def total(self) -> Tensor:
        return torch.nan_to_num(self.prose) + torch.nan_to_num(self.answer)


def step_loss(model: Any, batch: Batch) -> Loss:
    """Losses of a batch on the model's device."""
    device = model.lm_head.weight.device
    token_BT, role_BT = batch.token_BT.to(device), batch.role_BT.to(device)
    hidden_BTE = model.model(input_ids=token_BT, use_cache=False).last_hidden_state[:, :-1]
    target_BT, role_BT = token_BT[:, 1:], role_BT[:, 1:]
    parts = []
    for role, most in ((PROSE, MOST_PROSE), (ANSWER, None)):
        place_N = (role_BT == role).flatten().nonzero()[:, 0]
        if most is not None and len(place_N) > most:
            place_N = place_N[torch.randperm(len(place_N), device=device)[:most]]
        parts.append(_mean_nats(model, hidden_BTE.flatten(0, 1)[place_N], target_BT.flatten()[place_N]))
    return Loss(*parts)


def _mean_nats(model: Any, hidden_NE: Tensor, target_N: Tensor) -> Tensor:
    def piece(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), target, reduction="sum")

    pairs = zip(hidden_NE.split(PIECE), target_N.split(PIECE), strict=True)
    # Recomputed in the backward pass: logits of all positions at once would take gigabytes.
    sums = [checkpoint(piece, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(sums).sum() / len(target_N) if len(target_N) else hidden_NE.new_full((), math.nan)


@torch.no_grad()
def perplexity(model: Any, token_ids: list[int], window: int, windows: int) -> float:
    """Perplexity over the first ``windows`` windows of ``window`` tokens that do not overlap."""
    device = model.lm_head.weight.device
    nats = [
        _mean_nats(model, model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1], ids[1:])
        for ids in torch.tensor(token_ids[: window * windows], device=device).split(window)
        if len(ids) == window
    ]
    return math.exp(float(torch.stack(nats).mean()))


@torch.no_grad()
def recall(model: Any, batches: list[Batch]) -> float:
    """Share of examples all of whose answer tokens are the most likely ones, given those before."""
    right = total = 0
    for batch in batches:
        device = model.lm_head.weight.device
        token_BT, answer_BT = batch.token_BT.to(device), (batch.role_BT == ANSWER).to(device)[:, 1:]
        hidden_BTE = model.model(input_ids=token_BT, use_cache=False).last_hidden_state[:, :-1]
        for hidden_TE, target_T, answer_T in zip(hidden_BTE, token_BT[:, 1:], answer_BT, strict=True):
            guess_N = model.lm_head(hidden_TE[answer_T]).argmax(dim=-1)
            right += int((guess_N == target_T[answer_T]).all())
            total += 1
    return right / total
