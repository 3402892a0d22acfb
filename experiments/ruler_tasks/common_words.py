"""Common words extraction: name the ten most frequent words of a list (RULER paper arXiv 2404.06654, section 3.3).

Repetitions as in NVIDIA/RULER `scripts/synthetic.yaml` (freq_cw 30, freq_ucw 3, num_cw 10), those of the worked
example and of lengths below 4096 tokens as in its common words script. The example has turns of its own, as there: the
chat template is applied to its question and again to the one that is asked.
"""

from dataclasses import dataclass, replace
from random import Random

from experiments.ruler_tasks.task import Draft, Request, RulerTask, Solved
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import distinct_words

NEW_TOKENS = 120
COMMON = 10
FULL_LENGTH = 4096
"""Length in tokens from which the full repetitions apply."""


@dataclass(frozen=True)
class Repeats:
    """How often a list holds each common and each other word."""

    common: int
    other: int


@dataclass(frozen=True)
class Lists:
    """Repetitions of the list asked about and of the example's, and the example's number of distinct words."""

    asked: Repeats
    example: Repeats
    example_words: int


FULL = Lists(Repeats(30, 3), Repeats(10, 3), example_words=40)
SHORT = Lists(Repeats(6, 1), Repeats(3, 1), example_words=20)


def build(size: int, rng: Random, request: Request) -> Draft:
    """Return a worked example followed by a question about a list of `size` distinct words."""
    lists = FULL if request.length >= FULL_LENGTH else SHORT
    example = _word_list(lists.example_words, lists.example, rng)
    asked = _word_list(size, lists.asked, rng)
    solved = Solved(example.question, f"{example.prefix} {_numbered(list(example.answers))}")
    return replace(asked, examples=(solved,))


def _word_list(size: int, repeats: Repeats, rng: Random) -> Draft:
    """Return the question for one shuffled list; its common words are the answers."""
    words = distinct_words(size, rng)
    common, other = words[:COMMON], words[COMMON:]
    entries = common * repeats.common + other * repeats.other
    rng.shuffle(entries)
    return Draft(wording().cwe.format(context=_numbered(entries)), wording().cwe_prefix, tuple(common))


def _numbered(words: list[str]) -> str:
    """Return `words` as a running numbered list."""
    return " ".join(f"{position}. {word}" for position, word in enumerate(words, start=1))


# At least one word must be less frequent than the common ones.
COMMON_WORDS = RulerTask("cwe", NEW_TOKENS, build, min_size=COMMON + 1)
