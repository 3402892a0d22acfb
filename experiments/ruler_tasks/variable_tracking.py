"""Variable tracking: name every variable of one chain of assignments (RULER paper arXiv 2404.06654, section 3.2).

One chain of four hops, as in NVIDIA/RULER `scripts/synthetic.yaml`, hidden in noise in the order of assignment.  A
worked example with shorter names comes first; its names and value are random too, because a fixed example can give
very high scores (https://github.com/NVIDIA/Star-Attention/issues/2).
"""

from itertools import pairwise
from random import Random

from experiments.ruler_tasks.haystack import NOISE, hide
from experiments.ruler_tasks.task import Draft, RulerTask
from experiments.ruler_tasks.words import distinct, random_name, random_number

NEW_TOKENS = 30
HOPS = 4
NAME_LETTERS = 5
EXAMPLE_NAME_LETTERS = 3
VALUE_DIGITS = 5
# RULER builds the example for at most 500 tokens; with common tokenizers this many units of noise come close to it.
EXAMPLE_SIZE = 14
QUESTION = (
    "The text below hides a chain of variable assignments. Memorise the assignments and follow the chain.\n\n"
    "{context}\nQuestion: Which variables hold the value {value}, going by the text above? Name all of them."
)
PREFIX = "Answer: Going by the assignments in the text above, {count} variables hold the value {value}, namely:"


def _assignments(names: list[str], value: str) -> list[str]:
    """Return the lines that assign `value` to the first name and each name to the next one."""
    hops = [f"VAR {target} = VAR {source}" for source, target in pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


def _chain(size: int, value: str, name_letters: int, rng: Random) -> Draft:
    """Return the question for one chain that holds `value`, hidden in `size` units of noise."""
    names = distinct(HOPS + 1, lambda: random_name(rng, name_letters))
    context = hide(_assignments(names, value), [NOISE] * size, rng)
    prefix = PREFIX.format(count=len(names), value=value)
    return Draft(QUESTION.format(context=context, value=value), prefix, tuple(names))


def build(size: int, rng: Random) -> Draft:
    """Return a worked example followed by a question with `size` units of noise (at least one per variable)."""
    example_value, value = distinct(2, lambda: random_number(rng, VALUE_DIGITS))
    example = _chain(EXAMPLE_SIZE, example_value, EXAMPLE_NAME_LETTERS, rng)
    asked = _chain(size, value, NAME_LETTERS, rng)
    solved = f"{example.question}\n{example.prefix} {' '.join(example.answers)}"
    return Draft(f"{solved}\n\n{asked.question}", asked.prefix, asked.answers)


VARIABLE_TRACKING = RulerTask("vt", NEW_TOKENS, build, min_size=HOPS + 1)
