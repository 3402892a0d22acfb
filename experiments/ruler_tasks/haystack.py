"""Haystacks of lines and of prose, and the hiding of needles in them."""

import re
from random import Random

# RULER's 40 depths in per cent, evenly spaced and rounded.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
# A sentence ends at a full stop, question or exclamation mark, or at what closes after it, before a space and the start
# of another one. Abbreviations such as "Mr." end sentences too: needles only need places to stand, not grammar.
_SENTENCE_END = re.compile(r"(?:(?<=[.?!])|(?<=[.?!][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])")


def sentences(text: str) -> list[str]:
    """`text` split after its sentences.  RULER uses the Punkt model of nltk, which is a download."""
    return _SENTENCE_END.split(text)


def hide(needles: list[str], haystack: list[str], rng: Random) -> str:
    """Return `haystack` as lines, with each needle put before a random line of it.

    The needles keep their order, and at most one goes before each line, so `haystack` needs at least as many lines as
    there are needles.
    """
    before = dict(zip(sorted(rng.sample(range(len(haystack)), len(needles))), needles, strict=True))
    lines: list[str] = []
    for position, line in enumerate(haystack):
        if position in before:
            lines.append(before[position])
        lines.append(line)
    return "\n".join(lines)


def hide_in_prose(needles: list[str], text: str, rng: Random) -> str:
    """Return `text` with each needle between two sentences, at different ones of RULER's depths.

    A needle before the first or behind the last sentence, or next to another one, has an empty text on that side and so
    one more space, as in RULER.
    """
    prose = sentences(text)
    # The product in this order rounds as RULER's does: 29 % of 100 sentences are 28.
    places = sorted(int(len(prose) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles)))
    ends = [*places, len(prose)]
    parts = [" ".join(prose[: places[0]])]
    for needle, start, end in zip(needles, places, ends[1:], strict=True):
        parts += [needle, " ".join(prose[start:end])]
    return " ".join(parts)
