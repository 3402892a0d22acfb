"""The decode loop: tokens, positions and stopping, for one row or two a step. Start reading in ``decode``.

Suffixes: B sequences, R rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.finite import finite_rows, require_finite
from dualdecoder.graphs import StepRunner
from dualdecoder.method import KVMethod
from dualdecoder.model import Decoder
from dualdecoder.sampling import Sampler, Speculator


@dataclass(frozen=True)
class DecodeStep:
    """What one step gave. ``token_B`` is the new token of each sequence; ``active_B`` says whose it still matters.

    logits_BV: row 0's fp32 logits, from which ``token_B`` was chosen.
    speculated: for each sequence, whether the speculated token of this step's row 1 was the true one; None with one row
        and where the sequence had ended.
    seconds: wall time of the step; the first one's includes the pre-decode.
    """

    token_B: list[int]
    active_B: list[bool]
    logits_BV: Tensor
    speculated: list[bool] | None
    seconds: float


# (logits [B, R, V], positions [B] of row 0) -> tokens [B, R]; a Sampler, or a teacher that gives known tokens.
ChooseTokens = Callable[[Tensor, Tensor], Tensor]


def decode(
    model: Decoder,
    method: KVMethod,
    first_token_B: list[int],
    length_B: list[int],
    choose: ChooseTokens | Sampler,
    speculator: Speculator | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[DecodeStep]:
    """Decode without end, one token a sequence and step, until every sequence has produced a stop token.

    ``first_token_B`` is the token after each prompt, ``length_B`` the prompt lengths. The caller stops iterating when
    it has enough. ``speculator`` is needed for a method with two rows. Raises ``NotFiniteError`` for a sequence whose
    logits are not finite, whoever chooses the tokens.
    """
    loop = _Loop(model, method, choose, speculator, first_token_B, length_B)
    loop.active_B &= torch.tensor([t not in stop_ids for t in first_token_B])
    loop.seed_speculation()
    while loop.active_B.any():
        step = loop.advance()
        yield step
        loop.begin = time.perf_counter()
        loop.active_B &= torch.tensor([t not in stop_ids for t in step.token_B])


class _Loop:
    def __init__(
        self,
        model: Decoder,
        method: KVMethod,
        choose: ChooseTokens,
        speculator: Speculator | None,
        first_token_B: list[int],
        length_B: list[int],
    ) -> None:
        assert (speculator is None) == (method.rows == 1), "two rows need a speculator, one row has none"
        self.model, self.method, self.choose, self.speculator = model, method, choose, speculator
        self.token_B = torch.tensor(first_token_B, device=model.device)
        self.length_B = torch.tensor(length_B, device=model.device)
        self.active_B = torch.ones(len(first_token_B), dtype=torch.bool)
        self.guess_B: Tensor | None = None
        self.step = StepRunner(model, method)
        self.begin = time.perf_counter()

    def seed_speculation(self) -> None:
        """Pre-decode: a single-row step gives the true second token; nothing is committed (paper section 5.2)."""
        if self.speculator is None:
            return
        nobody_B = torch.zeros_like(self.active_B, device=self.model.device)
        logits_B1V = self.step(self.token_B[:, None], self.length_B, nobody_B)
        true_B = self.choose(logits_B1V, self.length_B)[:, 0]
        self.guess_B = self.speculator.first(self.token_B, true_B, self.active_B.to(self.model.device))

    def advance(self) -> DecodeStep:
        rows = [self.token_B] if self.guess_B is None else [self.token_B, self.guess_B]
        active_B = self.active_B.to(self.model.device)
        logits_BRV = self.step(torch.stack(rows, dim=1), self.length_B, active_B)
        chosen_BR = self.choose(logits_BRV, self.length_B)
        # Before the next guess is asked for: it replaces the one that these tokens are compared with.
        tokens, guessed = self._on_host(chosen_BR[:, 0], logits_BRV[:, 0])
        if self.speculator is not None:
            self.guess_B = self.speculator.following(chosen_BR[:, 0], chosen_BR[:, 1], active_B)
        self.length_B = self.length_B + active_B
        self.token_B = chosen_BR[:, 0]
        return DecodeStep(tokens, self.active_B.tolist(), logits_BRV[:, 0], guessed, time.perf_counter() - self.begin)

    def _on_host(self, token_B: Tensor, logits_BV: Tensor) -> tuple[list[int], list[bool] | None]:
        """The tokens, and whether each was guessed. All that the host asks of a step comes in one transfer."""
        right_B = torch.zeros_like(token_B) if self.guess_B is None else token_B == self.guess_B
        facts = [fact_B.to(token_B.dtype) for fact_B in (token_B, finite_rows(logits_BV), right_B)]
        tokens, finite, right = torch.stack(facts).tolist()
        require_finite(finite, self.model.dtype, self.active_B.tolist())
        return tokens, None if self.guess_B is None else [bool(one) for one in right]
