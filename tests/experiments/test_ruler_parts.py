"""What RULER's generators are built of: wording, haystacks, words."""

import importlib
from itertools import pairwise
from random import Random
from string import Formatter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.ruler_tasks.haystack import DEPTHS, hide, hide_in_prose, sentences
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import all_words, distinct, distinct_words, random_number


@given(st.integers(1, 30), st.integers(0, 30), st.integers())
def test_hide_keeps_every_line_and_the_order_of_the_needles(size: int, needle_count: int, seed: int) -> None:
    needles = [f"needle {i}" for i in range(min(size, needle_count))]
    haystack = [f"hay {i}" for i in range(size)]
    lines = hide(needles, haystack, Random(seed)).split("\n")
    assert [line for line in lines if line in needles] == needles
    assert [line for line in lines if line not in needles] == haystack


@given(st.integers(1, 60), st.integers(1, 4), st.integers())
def test_needles_in_prose_stand_between_sentences_at_rulers_depths(size: int, count: int, seed: int) -> None:
    prose = [f"Sentence {i} ends." for i in range(size)]
    needles = [f"Needle {i}." for i in range(count)]
    found = [part.strip() for part in sentences(hide_in_prose(needles, " ".join(prose), Random(seed)))]
    assert [part for part in found if part in prose] == prose
    assert [part for part in found if part in needles] == needles
    allowed = {int(size * (depth / 100)) for depth in DEPTHS}
    places = [sum(part in prose for part in found[: found.index(needle)]) for needle in needles]
    assert set(places) <= allowed


class Depths(Random):
    """Gives the depths that it is told to."""

    def __init__(self, *depths: int) -> None:
        super().__init__(0)
        self.depths = depths

    def sample(self, population, k: int) -> list[int]:
        assert set(self.depths) <= set(population) and k == len(self.depths)
        return list(self.depths)


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ((0, 51), " ONE. A1. A2. TWO. A3. A4."),
        ((100, 51), "A1. A2. ONE. A3. A4. TWO. "),
        ((51, 54), "A1. A2. ONE.  TWO. A3. A4."),
    ],
)
def test_a_needle_without_prose_beside_it_has_a_space_more_as_in_ruler(depths: tuple[int, int], expected: str) -> None:
    assert hide_in_prose(["ONE.", "TWO."], "A1. A2. A3. A4.", Depths(*depths)) == expected


@pytest.mark.parametrize(("size", "depth", "place"), [(300, 41, 122), (150, 82, 122), (700, 69, 482), (100, 51, 51)])
def test_a_depth_is_rounded_as_in_ruler(size: int, depth: int, place: int) -> None:
    """In floating point 300 * (41 / 100) is a little less than 123."""
    prose = " ".join(f"S{i}." for i in range(size))
    assert hide_in_prose(["ONE."], prose, Depths(depth)).split(" ").index("ONE.") == place


def test_depths_are_40_even_ones() -> None:
    assert len(set(DEPTHS)) == 40 and DEPTHS[0] == 0 and DEPTHS[-1] == 100
    assert {b - a for a, b in pairwise(DEPTHS)} == {2, 3}


def test_sentences_lose_nothing() -> None:
    text = 'It rained. "Come in!" she said. He asked (why?) The end, e.g. this one. 3.5 miles? Yes.'
    assert " ".join(sentences(text)) == text
    assert sentences(text)[:2] == ["It rained.", '"Come in!" she said.']
    assert "3.5 miles?" in sentences(text)


def test_word_pool_is_that_of_wonderwords_3_as_in_ruler_and_grows_by_pairs() -> None:
    assert len(all_words()) == len(set(all_words())) == 8166
    assert sorted(distinct_words(8166, Random(0))) == list(all_words())
    more = distinct_words(9000, Random(0))
    assert len(set(more)) == 9000 and set(all_words()) < set(more)
    assert all("-" in word for word in set(more) - set(all_words()))


FIELDS = {
    "niah": {"type_needle_v", "context", "query"},
    "niah_prefix": {"type_needle_v", "query"},
    "needle": {"type_needle_v", "key", "value"},
    "vt": {"context", "query"},
    "vt_prefix": {"num_v", "query"},
    "cwe": {"context"},
    "fwe": {"context"},
    "qa": {"context", "query"},
    "document": {"i", "document"},
}


def test_every_template_has_its_fields_and_every_prefix_its_space() -> None:
    for name, text in vars(wording()).items():
        assert {field for _, field, _, _ in Formatter().parse(text) if field} == FIELDS.get(name, set()), name
        assert text.startswith(" ") == name.endswith("_prefix") or name == "noise", name
    assert wording().noise.count(".") == 5
    assert "assgined" not in wording().vt_prefix and "assigned" in wording().vt_prefix


def test_the_parsed_wording_is_that_of_the_imported_modules() -> None:
    for name in ("cwe", "fwe"):
        module = importlib.import_module(f"lm_eval.tasks.ruler.{name}_utils")
        assert (getattr(wording(), name), getattr(wording(), f"{name}_prefix")) == (
            module.CONFIG["template"],
            module.CONFIG["answer_prefix"],
        )


def test_distinct_draws_again_instead_of_repeating() -> None:
    rng = Random(0)
    drawn = distinct(80, lambda: random_number(rng, 2), taken={str(n) for n in range(90, 100)})
    assert sorted(drawn) == [str(n) for n in range(10, 90)]
