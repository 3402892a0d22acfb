"""Needles in a haystack: find the values that belong to keys (RULER paper arXiv 2404.06654, section 3.1).

The eight variants of NVIDIA/RULER `scripts/synthetic.yaml`. Values are 7-digit numbers or UUIDs, keys adjective-noun
pairs or UUIDs. Where one value is asked for, the question is in the singular and the needle keeps the plural, as there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from experiments.ruler_tasks.haystack import hide, hide_in_prose
from experiments.ruler_tasks.task import Draft, Request, RulerTask
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import distinct, random_key, random_number, random_uuid

NEW_TOKENS = 128
VALUE_DIGITS = 7
_RANDOM: dict[str, Callable[[Random], str]] = {
    "words": random_key,
    "numbers": lambda rng: random_number(rng, VALUE_DIGITS),
    "uuids": random_uuid,
}
# RULER makes the sentences singular by replacing these words in the templates, in this order.
_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))


@dataclass(frozen=True)
class Needles:
    """A variant: kind of haystack (`noise`, `essay` or `needle`), of keys and of values, and how many of each."""

    haystack: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"

    def build(self, size: int, rng: Random, request: Request) -> Draft:
        """A question about `size` lines, or `size` words of essay."""
        keys = self._distinct(self.key_kind, self.keys, rng)
        values = self._distinct(self.value_kind, self.keys * self.values, rng)
        pairs = [(keys[place // self.values], value) for place, value in enumerate(values)]
        needles = [self._needle(*pair) for pair in pairs]
        rng.shuffle(needles)
        context = self._context(size, needles, {*keys, *values}, rng, request)
        asked = rng.sample(keys, self.queries)
        answers = tuple(value for wanted in asked for key, value in pairs if key == wanted)
        return Draft(*self._question(context, _enumeration(asked)), answers)

    def _context(self, size: int, needles: list[str], taken: set[str], rng: Random, request: Request) -> str:
        if self.haystack == "essay":
            return hide_in_prose(needles, " ".join(request.material.essay_words(size)), rng)
        if self.haystack == "noise":
            return hide(needles, [wording().noise] * size, rng)
        keys = self._distinct(self.key_kind, size, rng, taken)
        values = self._distinct(self.value_kind, size, rng, {*taken, *keys})
        return hide(needles, [self._needle(*pair) for pair in zip(keys, values, strict=True)], rng)

    def _distinct(
        self, kind: str, count: int, rng: Random, taken: frozenset[str] | set[str] = frozenset()
    ) -> list[str]:
        return distinct(count, lambda: _RANDOM[kind](rng), taken)

    def _needle(self, key: str, value: str) -> str:
        return wording().needle.format(type_needle_v=self.value_kind, key=key, value=value)

    def _question(self, context: str, query: str) -> tuple[str, str]:
        """The question and the opening of its answer."""
        templates, kind = (wording().niah, wording().niah_prefix), self.value_kind
        if self.queries * self.values == 1:
            templates, kind = (_singular(templates[0]), _singular(templates[1])), kind.removesuffix("s")
        question, prefix = templates
        return (
            question.format(type_needle_v=kind, context=context, query=query),
            prefix.format(type_needle_v=kind, query=query),
        )


def _singular(template: str) -> str:
    for plural, singular in _SINGULAR:
        template = template.replace(plural, singular)
    return template


def _enumeration(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


_VARIANTS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value_kind="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
NEEDLE_TASKS = [
    RulerTask(name, NEW_TOKENS, variant.build, min_size=variant.keys * variant.values)
    for name, variant in _VARIANTS.items()
]
