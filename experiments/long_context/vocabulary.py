"""Words, names, numbers and codes for training, none of which RULER's generators can give.

RULER's keys are pairs of wonderwords' words or UUIDs; its values numbers of 7 digits (5 for variables) or UUIDs; its
coded words have 6 letters, its variables 5 capitals (3 in the example). Here words are those of the prose that
wonderwords lacks, numbers have 4, 6, 8 or 9 digits, codes are grouped unlike UUIDs, coded words have 5 or 7 letters,
names 4 or 6 capitals.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase, ascii_uppercase

from experiments.ruler_tasks.words import all_words, distinct

NUMBER_DIGITS = (4, 6, 8, 9)
CODED_LETTERS = (5, 7)
NAME_LETTERS = (4, 6)
CODE_GROUPS = ((6, 5, 9), (4, 4, 4, 4), (10, 3, 3, 10), (7, 6, 5, 5, 9), (9, 4, 5, 4, 10))
_HEX = "0123456789abcdef"


@dataclass(frozen=True)
class Vocabulary:
    """English words of the prose, each seen at least three times and none of them one of RULER's."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, documents: Iterable[str]) -> Vocabulary:
        """The words of four letters and more of ``documents``."""
        counts: Counter[str] = Counter()
        for text in documents:
            counts.update(re.findall(r"\b[a-z]{4,}\b", text))
        taken = {part for word in all_words() for part in re.split(r"[ -]", word.lower())}
        return cls(tuple(sorted(word for word, count in counts.items() if count >= 3 and word not in taken)))

    def key(self, rng: Random) -> str:
        """Two words, as "ratified-commissioner" or "ratified commissioner"."""
        return rng.choice("- ").join(rng.sample(self.words, 2))

    def keys(self, count: int, rng: Random) -> list[str]:
        return distinct(count, lambda: self.key(rng))


def number(rng: Random) -> str:
    digits = rng.choice(NUMBER_DIGITS)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def code(rng: Random) -> str:
    """Hexadecimal groups joined by hyphens, never grouped as a UUID's are."""
    return "-".join("".join(rng.choices(_HEX, k=size)) for size in rng.choice(CODE_GROUPS))


def coded_words(count: int, rng: Random) -> list[str]:
    letters = rng.choice(CODED_LETTERS)
    return distinct(count, lambda: "".join(rng.choices(ascii_lowercase, k=letters)))


def names(count: int, rng: Random) -> list[str]:
    letters = rng.choice(NAME_LETTERS)
    return distinct(count, lambda: "".join(rng.choices(ascii_uppercase, k=letters)))


VALUES: dict[str, Callable[[Random], str]] = {"number": number, "code": code}
