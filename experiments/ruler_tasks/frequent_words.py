"""Frequent words extraction: name the three most frequent words of a coded text (RULER paper, section 3.3).

Words are six random letters. The word of rank k stands n * k^-alpha / zeta(alpha) times in a text of about n words;
rank 1 is written as dots, which the question says to ignore, so ranks 2 to 4 are asked for. Parameters as in
NVIDIA/RULER `scripts/synthetic.yaml`: alpha 2, one word of vocabulary, the dots among them, for every 50 tokens of the
prompt, which is the length without the 50 tokens to generate. No worked example.
"""

from math import pi
from random import Random

from experiments.ruler_tasks.task import Draft, Request, RulerTask
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import distinct, random_code

NEW_TOKENS = 50
CODE_LETTERS = 6
TOKENS_PER_WORD = 50
ALPHA = 2.0
ZETA = pi**2 / 6
"""The Riemann zeta function at 2."""
DOTS = "..."
ASKED = 3
# From this many words on, ranks 2 to 5 have different counts: the answers are more frequent than every other word.
MIN_WORDS = 100


def build(size: int, rng: Random, request: Request) -> Draft:
    """Return the question about a text of about `size` words."""
    # The dots, the words asked for and one more, also where a length is too short for RULER's own number.
    vocabulary = max((request.length - NEW_TOKENS) // TOKENS_PER_WORD, ASKED + 2)
    codes = [DOTS, *distinct(vocabulary - 1, lambda: random_code(rng, CODE_LETTERS))]
    words = [code for rank, code in enumerate(codes, start=1) for _ in range(_count(size, rank))]
    rng.shuffle(words)
    question = wording().fwe.format(context=" ".join(words))
    return Draft(question, wording().fwe_prefix, tuple(codes[1 : 1 + ASKED]))


def _count(size: int, rank: int) -> int:
    return int(size * rank**-ALPHA / ZETA)


FREQUENT_WORDS = RulerTask("fwe", NEW_TOKENS, build, min_size=MIN_WORDS)
