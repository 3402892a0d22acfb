"""Random words, keys, numbers, names and UUIDs.

The words come from wonderwords, as in RULER; other releases of that package can give other samples.
"""

import hashlib
from collections.abc import Callable, Collection
from functools import cache
from random import Random
from string import ascii_lowercase, ascii_uppercase
from uuid import UUID

from wonderwords import RandomWord

CATEGORIES = ("noun", "adjective", "verb")


@cache
def _category(name: str) -> tuple[str, ...]:
    """Return the words of one wonderwords category in alphabetical order."""
    return tuple(sorted(set(RandomWord(enhanced_prefixes=False).filter(include_categories=[name]))))


@cache
def all_words() -> tuple[str, ...]:
    """Return every noun, adjective and verb once, in alphabetical order; a few contain a space or a hyphen."""
    return tuple(sorted({word for name in CATEGORIES for word in _category(name)}))


@cache
def words_digest() -> str:
    """SHA-256 of all words by category."""
    return hashlib.sha256(repr([_category(name) for name in CATEGORIES]).encode()).hexdigest()


def random_key(rng: Random) -> str:
    """Return a random adjective-noun pair such as "quiet-harbor"."""
    return f"{rng.choice(_category('adjective'))}-{rng.choice(_category('noun'))}"


def random_number(rng: Random, digits: int) -> str:
    """Return a random number with `digits` digits, the first of them not zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def random_uuid(rng: Random) -> str:
    """Return a random UUID of version 4."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def random_code(rng: Random, letters: int) -> str:
    """Return a random word of `letters` small letters."""
    return "".join(rng.choices(ascii_lowercase, k=letters))


def random_name(rng: Random, letters: int) -> str:
    """Return a random name of `letters` capital letters."""
    return "".join(rng.choices(ascii_uppercase, k=letters))


def distinct_words(count: int, rng: Random) -> list[str]:
    """Return `count` different words in random order.

    Beyond wonderwords' 8,166 words (about 200K tokens of `cwe`) adjective-noun pairs join them; RULER then takes its
    words from another list, of 8.6 MB, which is not shipped here.
    """
    words = all_words()
    if count <= len(words):
        return rng.sample(words, count)
    pairs = distinct(count - len(words), lambda: random_key(rng), taken=frozenset(words))
    return rng.sample([*words, *pairs], count)


def distinct(count: int, draw: Callable[[], str], taken: Collection[str] = ()) -> list[str]:
    """Return `count` different results of `draw`, none of them in `taken`, in the order drawn.

    `draw` must have far more than `count` results to choose from, as repeats are drawn again.
    """
    found: dict[str, None] = {}
    while len(found) < count:
        candidate = draw()
        if candidate not in taken:
            found[candidate] = None
    return list(found)
