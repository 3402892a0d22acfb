"""What the engine gives: text, tokens as they come, a run in progress, and its statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from dualdecoder.decode import DecodeStep
from dualdecoder.ledger import MemoryPlan
from dualdecoder.method import KVMethod


@dataclass(frozen=True)
class Completion:
    """Generated text and tokens of one prompt. ``finish_reason`` is ``stop`` (a stop token) or ``length``."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sequence; ``text`` is what can be printed now (empty inside a character)."""

    sequence: int
    token_id: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True)
class Run:
    """A prefilled batch and the steps still to be taken. ``first_tokens``: the token after each prompt."""

    method: KVMethod
    first_tokens: list[int]
    steps: Iterator[DecodeStep]
    prefill_s: float


@dataclass
class RunStatistics:
    """Seconds, tokens and bytes of the last ``generate`` or ``stream``; ``method`` holds the method's own counters."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prompts: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    method: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the steps made per second of the steps; each prompt's first token belongs to the prefill."""
        return (self.new_tokens - self.prompts) / self.decode_s if self.decode_s else math.nan
