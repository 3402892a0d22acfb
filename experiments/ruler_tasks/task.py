"""What a RULER task is, and what it produces."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from experiments.ruler_tasks.material import Material


@dataclass(frozen=True)
class Solved:
    """A worked example that stands before a question in turns of its own.

    Attributes:
        question: text of the user's turn.
        answer: text of the assistant's turn, its opening included.
    """

    question: str
    answer: str


@dataclass(frozen=True)
class Draft:
    """One question before the chat template is applied.

    Attributes:
        question: text of the user's turn.
        prefix: opening of the assistant's turn, which the model continues.
        answers: gold strings; the order has no meaning.
        examples: worked examples before it.
    """

    question: str
    prefix: str
    answers: tuple[str, ...]
    examples: tuple[Solved, ...] = ()


@dataclass(frozen=True)
class Request:
    """Which sample is wanted: RULER's `length` in tokens, the number of the sample, and its texts."""

    length: int
    index: int
    material: Material


Build = Callable[[int, Random, Request], Draft]
"""Makes a draft from a haystack size and a random source; equal inputs give equal drafts."""


@dataclass(frozen=True)
class RulerTask:
    """A generator of questions whose haystack grows with an integer size.

    Attributes:
        name: RULER's name of the task.
        new_tokens: tokens the model may generate (NVIDIA/RULER `scripts/data/synthetic/constants.py`).
        build: makes the question.
        min_size: smallest haystack size `build` takes.  Sizes step by one; the unit is the task's own.
        match: `all` scores the share of gold strings found, `any` whether one of them is found.
        needs: name of the data file without which there is no sample, or empty.
    """

    name: str
    new_tokens: int
    build: Build
    min_size: int
    match: Literal["all", "any"] = "all"
    needs: str = ""


@dataclass(frozen=True)
class RulerSample:
    """One prompt, ready to send to a model.

    Attributes:
        task: name of the task.
        length: target in tokens for prompt and generated tokens together.
        index: number of the sample within its task and length.
        prompt: chat-templated text including the opening of the answer.
        token_ids: `prompt` encoded, each special token once, nothing added.
        answers: gold strings, see `score`.
        new_tokens: tokens to generate.
    """

    task: str
    length: int
    index: int
    prompt: str
    token_ids: tuple[int, ...]
    answers: tuple[str, ...]
    new_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the longest answer together; at most `length`."""
        return len(self.token_ids) + self.new_tokens
