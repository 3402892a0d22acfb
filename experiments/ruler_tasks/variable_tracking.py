"""Variable tracking: name every variable of one chain of assignments (RULER paper arXiv 2404.06654, section 3.2).

One chain of four hops, as in NVIDIA/RULER `scripts/synthetic.yaml`, hidden in noise in the order of assignment. A
worked example with shorter names comes first, with as much noise as fits 500 tokens; its names and value are random in
every sample, because a fixed example can give very high scores (https://github.com/NVIDIA/Star-Attention/issues/2).
"""

from itertools import pairwise
from random import Random

from experiments.ruler_tasks.haystack import hide
from experiments.ruler_tasks.task import Draft, Request, RulerTask
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import distinct, random_name, random_number

NEW_TOKENS = 30
HOPS = 4
NAME_LETTERS = 5
EXAMPLE_NAME_LETTERS = 3
EXAMPLE_TOKENS = 500
VALUE_DIGITS = 5


def _assignments(names: list[str], value: str) -> list[str]:
    """Return the lines that assign `value` to the first name and each name to the next one, spaced as in RULER."""
    hops = [f"VAR {target} = VAR {source} " for source, target in pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


def _chain(size: int, value: str, name_letters: int, rng: Random) -> Draft:
    """Return the question for one chain that holds `value`, hidden in `size` units of noise."""
    names = distinct(HOPS + 1, lambda: random_name(rng, name_letters))
    context = hide(_assignments(names, value), [wording().noise] * size, rng)
    fields = {"query": value, "num_v": len(names)}
    question = wording().vt.format(context=context, **fields)
    return Draft(question, wording().vt_prefix.format(**fields), tuple(names))


def _example_size(draft: Draft, size: int, request: Request) -> int:
    """Units of noise that fill an example to its limit, by the tokens of a smaller one and of one unit."""
    unit = request.material.count("\n" + wording().noise)
    used = request.material.count(draft.question + draft.prefix)
    return size + max(0, EXAMPLE_TOKENS - used) // unit


def build(size: int, rng: Random, request: Request) -> Draft:
    """Return a worked example followed by a question with `size` units of noise (at least one per variable)."""
    example_value, value = distinct(2, lambda: random_number(rng, VALUE_DIGITS))
    smallest = _chain(HOPS + 1, example_value, EXAMPLE_NAME_LETTERS, Random(0))
    example_size = _example_size(smallest, HOPS + 1, request)
    example = _chain(example_size, example_value, EXAMPLE_NAME_LETTERS, rng)
    asked = _chain(size, value, NAME_LETTERS, rng)
    solved = f"{example.question}{example.prefix} {' '.join(example.answers)}"
    return Draft(f"{solved}\n\n{asked.question}", asked.prefix, asked.answers)


VARIABLE_TRACKING = RulerTask("vt", NEW_TOKENS, build, min_size=HOPS + 1)
