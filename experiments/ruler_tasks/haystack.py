"""The noise haystack and the hiding of lines in a haystack."""

from random import Random

NOISE = "Leaves are green. Water is blue. Sand is yellow. Off we go. Soon we come home again."
"""One unit of noise: five short sentences that say nothing of use."""


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
