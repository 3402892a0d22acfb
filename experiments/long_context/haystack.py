"""Haystacks as token ids, and the hiding of statements in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

Tokenize = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prose:
    """All training documents as one ring of token ids."""

    token_ids: Sequence[int]

    def piece(self, tokens: int, rng: Random) -> list[int]:
        """``tokens`` ids from a random place on; the ring starts again at its end."""
        start = rng.randrange(len(self.token_ids))
        found = list(self.token_ids[start : start + tokens])
        while len(found) < tokens:
            found += self.token_ids[: tokens - len(found)]
        return found


def hide(statements: Sequence[list[int]], haystack: list[int], rng: Random, only_after: int) -> list[int]:
    """``haystack`` with the statements, in their order, each behind a random one of its tokens ``only_after``."""
    places = sorted(_after(haystack, rng.randrange(len(haystack) + 1), only_after) for _ in statements)
    out: list[int] = []
    last = 0
    for statement, place in zip(statements, places, strict=True):
        out += haystack[last:place]
        out += statement
        last = place
    return out + haystack[last:]


def _after(haystack: list[int], place: int, token: int) -> int:
    """The first place from ``place`` on that follows ``token``, or the end."""
    try:
        return haystack.index(token, place) + 1
    except ValueError:
        return len(haystack)
