"""Needle in a haystack: find the number that belongs to a key (RULER paper arXiv 2404.06654, section 3.1).

Keys are adjective-noun pairs and values 7-digit numbers, as `words` and `numbers` in NVIDIA/RULER
`scripts/synthetic.yaml`.  One key is asked for and it has one value, so the question is in the singular, while the
needle keeps the plural.
"""

from collections.abc import Callable
from random import Random

from experiments.ruler_tasks.haystack import NOISE, hide
from experiments.ruler_tasks.task import Draft, RulerTask
from experiments.ruler_tasks.words import distinct, random_key, random_number

NEW_TOKENS = 128
VALUE_DIGITS = 7
NEEDLE = "The special magic numbers include one for {key}, which is: {value}."
QUESTION = (
    "Somewhere in the text below there is a special magic number. Remember it, because a question about the number "
    "follows the text.\n{context}\nWhich special magic number does the text above give for {key}?"
)
PREFIX = "The special magic number that the text above gives for {key} is"

Haystack = Callable[[int, Random, str, str], list[str]]
"""Makes a haystack of a given size whose lines hold neither the key nor the value passed."""


def needle(key: str, value: str) -> str:
    """Return the sentence that hides `value` under `key`."""
    return NEEDLE.format(key=key, value=value)


def noise_lines(size: int, rng: Random, key: str, value: str) -> list[str]:
    """Return `size` units of noise, the haystack "noise" of RULER."""
    return [NOISE] * size


def needle_lines(size: int, rng: Random, key: str, value: str) -> list[str]:
    """Return `size` needles with other keys and values, all distinct: the haystack "needle" of RULER."""
    keys = distinct(size, lambda: random_key(rng), taken={key})
    values = distinct(size, lambda: random_number(rng, VALUE_DIGITS), taken={value})
    return [needle(*pair) for pair in zip(keys, values, strict=True)]


def one_needle_task(name: str, haystack: Haystack) -> RulerTask:
    """Return the task of finding one needle in `haystack`; its size is the number of haystack lines."""

    def build(size: int, rng: Random) -> Draft:
        key, value = random_key(rng), random_number(rng, VALUE_DIGITS)
        context = hide([needle(key, value)], haystack(size, rng, key, value), rng)
        return Draft(QUESTION.format(context=context, key=key), PREFIX.format(key=key), (value,))

    return RulerTask(name, NEW_TOKENS, build, min_size=1)


NIAH_SINGLE_1 = one_needle_task("niah_single_1", noise_lines)
NIAH_MULTIKEY_2 = one_needle_task("niah_multikey_2", needle_lines)
