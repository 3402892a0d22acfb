"""Choosing tokens from logits, and the source of the speculated row's token.

Suffixes: B sequences, R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dualdecoder.config import SamplingConfig

# Below it sampling is greedy. So small a divisor leaves a single token any chance, and soon is 0 in fp32.
LEAST_TEMPERATURE = 1e-5


class Sampler:
    """Greedy or seeded sampling by the Gumbel-max trick.

    The noise belongs to a sequence and a position, not to a call. So the speculated row draws with the same noise as
    the real row will one step later, and a good speculation is right under sampling too.
    """

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config

    def __call__(self, logits_BRV: Tensor, position_B: Tensor) -> Tensor:
        """Tokens ``[B, R]`` that follow rows at ``position_B + 0, 1``."""
        if self.config.temperature < LEAST_TEMPERATURE:
            return logits_BRV.argmax(dim=-1)
        noise_BRV = torch.stack(
            [
                torch.stack([self._noise(b, p + r, logits_BRV) for r in range(logits_BRV.shape[1])])
                for b, p in enumerate(position_B.tolist())
            ]
        )
        # Only differences count; taken from the best, their quotients overflow to "never" and not to "always".
        behind_BRV = logits_BRV - logits_BRV.amax(dim=-1, keepdim=True)
        return (self._cut(behind_BRV / self.config.temperature) + noise_BRV).argmax(dim=-1)

    def _noise(self, sequence: int, position: int, logits: Tensor) -> Tensor:
        # Python hashes a tuple of integers to the same number in every process.
        seed = hash((self.config.seed, sequence, position)) & 0x7FFF_FFFF_FFFF_FFFF
        generator = torch.Generator().manual_seed(seed)
        uniform_V = torch.rand(logits.shape[-1], generator=generator, dtype=torch.float64)
        return (-(-uniform_V.clamp(min=1e-12).log()).log()).to(logits)

    def _cut(self, logits: Tensor) -> Tensor:
        if self.config.top_k is not None:
            kth = logits.topk(min(self.config.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        # At 1 nothing is to be cut, though the cumulative sum may round to more than the whole.
        if self.config.top_p is not None and self.config.top_p < 1:
            logits = self._cut_tail(logits, self.config.top_p)
        return logits

    @staticmethod
    def _cut_tail(logits: Tensor, top_p: float) -> Tensor:
        ordered, index = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(dim=-1)
        # The token that crosses the threshold stays, so the first always does.
        outside = probability.cumsum(dim=-1) - probability >= top_p
        return logits.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), -torch.inf)


class Speculator(Protocol):
    """Where the token of row 1 comes from.

    ``token_B``: the true token of the step to come. ``active_B`` (bool): the sequences that will take it.
    """

    def first(self, token_B: Tensor, true_B: Tensor, active_B: Tensor) -> Tensor:
        """T' of the first step; ``true_B`` are the true second tokens from the pre-decode."""

    def following(self, token_B: Tensor, from_row_1_B: Tensor, active_B: Tensor) -> Tensor:
        """T' of the next step, given the token that row 1 produced."""


class SelfSpeculator:
    """T' of the next step from row 1 itself, or at random (paper section 5.2, Fig. 7b)."""

    def __init__(self, kind: str, vocabulary: int, seed: int) -> None:
        self.kind, self.vocabulary = kind, vocabulary
        self.generator = torch.Generator().manual_seed(seed)

    def first(self, token_B: Tensor, true_B: Tensor, active_B: Tensor) -> Tensor:
        return true_B if self.kind == "self" else self._random(true_B)

    def following(self, token_B: Tensor, from_row_1_B: Tensor, active_B: Tensor) -> Tensor:
        return self._random(from_row_1_B) if self.kind == "random" else from_row_1_B

    def _random(self, like_B: Tensor) -> Tensor:
        return torch.randint(self.vocabulary, like_B.shape, generator=self.generator).to(like_B.device)
