"""What a RULER task is, and what it produces."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Draft:
    """One question before the chat template is applied.

    Attributes:
        question: text of the user's turn.
        prefix: opening of the assistant's turn, which the model continues.
        answers: gold strings; the order has no meaning.
    """

    question: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class RulerTask:
    """A generator of questions whose haystack grows with an integer size.

    Attributes:
        name: RULER's name of the task.
        new_tokens: tokens the model may generate (NVIDIA/RULER `scripts/data/synthetic/constants.py`).
        build: makes a draft from a haystack size and a random source; equal inputs give equal drafts.
        min_size: smallest haystack size `build` takes.  Sizes step by one; the unit is the task's own.
        max_size: largest haystack size `build` takes, or None when only memory limits it.
        short: the task to use instead at lengths below `short_below`, or None.
        short_below: length in tokens under which `short` applies.
    """

    name: str
    new_tokens: int
    build: Callable[[int, Random], Draft]
    min_size: int
    max_size: int | None = None
    short: "RulerTask | None" = None
    short_below: int = 0

    def for_length(self, length: int) -> "RulerTask":
        """Return the variant of this task that RULER uses at `length` tokens."""
        return self.short if self.short is not None and length < self.short_below else self


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
