"""Common words extraction: name the ten most frequent words of a list (RULER paper arXiv 2404.06654, section 3.3).

Repetitions as in NVIDIA/RULER `scripts/synthetic.yaml` (freq_cw 30, freq_ucw 3, num_cw 10), those of the worked
example and of lengths below 4096 tokens as in its common words script.
"""

from dataclasses import dataclass
from random import Random

from experiments.ruler_tasks.task import Draft, RulerTask
from experiments.ruler_tasks.words import all_words

NEW_TOKENS = 120
COMMON = 10
FULL_LENGTH = 4096
"""Length in tokens from which the full repetitions apply."""
QUESTION = (
    "Here is a numbered list of words in which some words come up more often than the rest. Memorise the frequent "
    "ones.\n{context}\nQuestion: Which {count} words come up most often in the list above?"
)
PREFIX = "Answer: The {count} words that come up most often in the list above are:"


@dataclass(frozen=True)
class Repeats:
    """How often a list holds each common and each other word."""

    common: int
    other: int


def _numbered(words: list[str]) -> str:
    """Return `words` as a running numbered list."""
    return " ".join(f"{position}. {word}" for position, word in enumerate(words, start=1))


def _word_list(distinct_words: int, repeats: Repeats, rng: Random) -> Draft:
    """Return the question for one shuffled list; its common words are the answers."""
    words = rng.sample(all_words(), distinct_words)
    common, other = words[:COMMON], words[COMMON:]
    entries = common * repeats.common + other * repeats.other
    rng.shuffle(entries)
    question = QUESTION.format(context=_numbered(entries), count=COMMON)
    return Draft(question, PREFIX.format(count=COMMON), tuple(common))


def common_words_task(
    repeats: Repeats, example_words: int, example_repeats: Repeats, short: RulerTask | None = None
) -> RulerTask:
    """Return a task whose size is the number of distinct words, and which shows one worked example first.

    Args:
        repeats: repetitions in the list that is asked about.
        example_words: distinct words of the worked example.
        example_repeats: repetitions in the worked example.
        short: the task to use instead below 4096 tokens.
    """

    def build(size: int, rng: Random) -> Draft:
        example = _word_list(example_words, example_repeats, rng)
        asked = _word_list(size, repeats, rng)
        solved = f"{example.question}\n{example.prefix} {_numbered(list(example.answers))}"
        return Draft(f"{solved}\n\n{asked.question}", asked.prefix, asked.answers)

    # At least one word must be less frequent than the common ones.
    return RulerTask("cwe", NEW_TOKENS, build, COMMON + 1, len(all_words()), short, FULL_LENGTH if short else 0)


_SHORT = common_words_task(Repeats(common=6, other=1), example_words=20, example_repeats=Repeats(common=3, other=1))
COMMON_WORDS = common_words_task(
    Repeats(common=30, other=3), example_words=40, example_repeats=Repeats(common=10, other=3), short=_SHORT
)
