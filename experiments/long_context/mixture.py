"""What each training step is made of: a curriculum of lengths, and examples drawn from a seed and the step's number.

A step's examples depend on nothing but the seed and the number, so a run that was stopped goes on as if it never had.
Suffixes: B examples, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from experiments.long_context.example import NOTHING, Example
from experiments.long_context.tasks import Maker

# Shares of the steps; tasks of equal length are not mixed with prose in one step.
SHARES = {"language": 0.35, "lookup": 0.38, "chain": 0.10, "common": 0.08, "frequent": 0.09}
# Of the steps of a stage, those that go back to a shorter length.
SHORTER = 0.3


@dataclass(frozen=True)
class Stage:
    """``steps`` steps of at most ``length`` tokens an example."""

    length: int
    steps: int


@dataclass(frozen=True)
class Batch:
    """token_BT (int64) and role_BT (int8), padded at the end with tokens that teach nothing."""

    task: str
    length: int
    token_BT: Tensor
    role_BT: Tensor


@dataclass(frozen=True)
class Mixture:
    """Batches of about ``step_tokens`` tokens by the number of the step."""

    maker: Maker
    stages: Sequence[Stage]
    step_tokens: int
    seed: int
    padding: int

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def batch(self, step: int) -> Batch:
        rng = Random(f"long-context/{self.seed}/{step}")
        length = self._length(step, rng)
        task = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
        examples = [self.maker.make(task, length, rng) for _ in range(max(1, self.step_tokens // length))]
        return _padded(task, length, examples, self.padding)

    def _length(self, step: int, rng: Random) -> int:
        past = 0
        for number, stage in enumerate(self.stages):
            past += stage.steps
            if step < past:
                shorter = [earlier.length for earlier in self.stages[:number]]
                return rng.choice(shorter) if shorter and rng.random() < SHORTER else stage.length
        raise IndexError(f"step {step} of {self.steps}")


def _padded(task: str, length: int, examples: list[Example], padding: int) -> Batch:
    # Cut at the length of the step: a task may miss it by a little, and only what is learnt last is lost.
    longest = min(length, max(len(example.token_ids) for example in examples))
    token_BT = torch.full((len(examples), longest), padding)
    role_BT = torch.full((len(examples), longest), NOTHING, dtype=torch.int8)
    for row, example in enumerate(examples):
        size = min(longest, len(example.token_ids))
        token_BT[row, :size] = torch.tensor(example.token_ids[:size])
        role_BT[row, :size] = torch.tensor(example.roles[:size], dtype=torch.int8)
    return Batch(task, length, token_BT, role_BT)
