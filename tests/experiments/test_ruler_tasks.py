"""RULER tasks: lengths, the content of each task checked by independent readers, determinism, scoring, errors."""

import copy
import os
import re
import subprocess
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from dualdecoder.checkpoints import load_tokenizer
from experiments.ruler_tasks import TASKS, RulerSample, RulerTask, make_sample, score
from experiments.ruler_tasks.fitting import fit
from experiments.ruler_tasks.haystack import hide
from experiments.ruler_tasks.words import all_words, distinct, random_number

NEW_TOKENS = {"niah_single_1": 128, "niah_multikey_2": 128, "vt": 30, "cwe": 120}
NEEDLE = re.compile(r"^The special magic numbers include one for (\S.*), which is: (\d+)\.$", re.MULTILINE)
ENTRY = re.compile(r"(?<!\S)(\d+)\. (.+?)(?= \d+\. |$)", re.MULTILINE)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2")


def encoded_length(tokenizer, sample: RulerSample) -> int:
    return len(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])


def asked_key(sample: RulerSample) -> str:
    return re.search(r"the text above gives for (.+) is$", sample.prompt).group(1)


def test_the_four_tasks_have_rulers_names_and_generated_tokens():
    assert {name: task.new_tokens for name, task in TASKS.items()} == NEW_TOKENS
    assert all(task.name == name for name, task in TASKS.items())


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("length", "share"), [(1024, 0.90), (2048, 0.90), (4096, 0.95)])
def test_samples_fill_but_never_exceed_the_length(tokenizer, name, length, share):
    for index in range(8):
        sample = make_sample(name, tokenizer, length, index)
        total = encoded_length(tokenizer, sample) + NEW_TOKENS[name]
        assert share * length <= total <= length
        assert sample.total_tokens == total


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(TASKS)), length=st.integers(1000, 5000), index=st.integers(0, 10**6))
def test_any_length_is_filled_up_to_one_unit_of_haystack(tokenizer, name, length, index):
    sample = make_sample(name, tokenizer, length, index)
    assert length - 80 < encoded_length(tokenizer, sample) + NEW_TOKENS[name] <= length
    assert (sample.task, sample.length, sample.index) == (name, length, index)


@settings(max_examples=200, deadline=None)
@given(
    first=st.integers(1, 500),
    steps=st.lists(st.integers(1, 60), min_size=1, max_size=400),
    room=st.integers(0, 20_000),
    min_size=st.integers(1, 20),
)
def test_fit_finds_the_largest_size_in_few_tries(first, steps, room, min_size):
    def total(size: int) -> int:
        return first + sum(steps[i % len(steps)] for i in range(min_size, size))

    drawn: list[int] = []

    def draw(size: int) -> RulerSample:
        drawn.append(size)
        return RulerSample("fake", 0, size, "", (0,) * total(size), ("a",), 0)

    chosen = fit(draw, RulerTask("fake", 0, lambda size, rng: None, min_size), first + room).index
    assert total(chosen) <= first + room < total(chosen + 1)
    assert len(drawn) <= 16 + 3 * 16


@pytest.mark.parametrize("name", TASKS)
def test_the_chat_template_wraps_the_question_and_the_prefix_follows_the_assistant_header(tokenizer, name):
    sample = make_sample(name, tokenizer, 1024, 0)
    head, prefix = sample.prompt.rsplit("<|im_start|>assistant\n", 1)
    question = head.split("<|im_start|>user\n")[1].removesuffix("<|im_end|>\n")
    chat = [{"role": "user", "content": question}]
    assert sample.prompt == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + prefix
    assert prefix == prefix.strip() != ""
    assert all(answer not in prefix for answer in sample.answers)
    assert tokenizer.decode(list(sample.token_ids), clean_up_tokenization_spaces=False) == sample.prompt
    header = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert sample.token_ids.count(header) == sample.prompt.count("<|im_start|>") == 3


def test_bos_is_not_doubled_by_a_tokenizer_that_adds_it(tokenizer):
    adding = copy.deepcopy(tokenizer)
    bos = adding.convert_tokens_to_ids("<|endoftext|>")
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    adding.chat_template = "<|endoftext|>" + tokenizer.chat_template
    assert adding("x")["input_ids"][0] == bos, "the tokenizer of this test must add a BOS by itself"
    sample = make_sample("niah_single_1", adding, 1024, 0)
    assert [place for place, token in enumerate(sample.token_ids) if token == bos] == [0]


def test_niah_single_1_holds_one_needle_in_noise(tokenizer):
    for index in range(8):
        sample = make_sample("niah_single_1", tokenizer, 2048, index)
        assert NEEDLE.findall(sample.prompt) == [(asked_key(sample), sample.answers[0])]
        assert sample.prompt.count("Sand is yellow.") > 60
        assert re.fullmatch(r"[1-9]\d{6}", sample.answers[0])


def test_niah_multikey_2_holds_only_needles_and_the_asked_key_once(tokenizer):
    for index in range(8):
        sample = make_sample("niah_multikey_2", tokenizer, 4096, index)
        needles = NEEDLE.findall(sample.prompt)
        body = sample.prompt.split("follows the text.\n")[1].split("\nWhich special")[0]
        assert len(needles) == len(body.split("\n")) > 80
        assert [value for key, value in needles if key == asked_key(sample)] == list(sample.answers)
        assert len({key for key, _ in needles}) == len({value for _, value in needles}) == len(needles)
        assert all("-" in key and re.fullmatch(r"[1-9]\d{6}", value) for key, value in needles)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2"])
def test_needles_lie_at_all_depths(tokenizer, name):
    samples = [make_sample(name, tokenizer, 1024, index) for index in range(80)]
    quarters = Counter(4 * s.prompt.index(s.answers[0]) // len(s.prompt) for s in samples)
    assert all(quarters[quarter] >= 6 for quarter in range(4)), quarters


@given(st.integers(1, 30), st.integers(0, 30), st.integers())
def test_hide_keeps_every_line_and_the_order_of_the_needles(size, needle_count, seed):
    needles = [f"needle {i}" for i in range(min(size, needle_count))]
    haystack = [f"hay {i}" for i in range(size)]
    lines = hide(needles, haystack, Random(seed)).split("\n")
    assert [line for line in lines if line in needles] == needles
    assert [line for line in lines if line not in needles] == haystack


def run_assignments(text: str) -> dict[str, list[str]]:
    """Execute the assignments in order; return each value with the names that hold it."""
    values: dict[str, str] = {}
    for target, source in re.findall(r"^VAR (\w+) = (.+)$", text, re.MULTILINE):
        assert target not in values, "a variable is assigned once"
        values[target] = values[source.removeprefix("VAR ")] if source.startswith("VAR ") else source
    holders: dict[str, list[str]] = {}
    for name, value in values.items():
        holders.setdefault(value, []).append(name)
    return holders


def test_vt_answers_hold_the_asked_value_and_the_example_is_solved_rightly(tokenizer):
    examples = set()
    for index in range(6):
        sample = make_sample("vt", tokenizer, 2048, index)
        [(value, solved), (asked, rest)] = re.findall(r"5 variables hold the value (\d+), namely:(.*)", sample.prompt)
        holders = run_assignments(sample.prompt)
        assert rest == ""
        assert set(holders) == {value, asked}
        assert holders[value] == solved.split()
        assert sorted(holders[asked]) == sorted(sample.answers)
        assert [len(name) for names in holders.values() for name in names] == [3] * 5 + [5] * 5
        assert all(re.fullmatch(r"[1-9]\d{4}", number) for number in (value, asked))
        examples.add((value, solved))
    assert len({value for value, _ in examples}) == len({solved for _, solved in examples}) == 6


def check_word_list(entries: list[tuple[str, str]], answers: set[str], common: int, other: int) -> None:
    counts = Counter(word for _, word in entries)
    assert {word for word, count in counts.items() if count == common} == answers
    assert len(answers) == 10
    assert set(counts.values()) == {common, other}
    assert set(counts) <= set(all_words())
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    places = [place for place, (_, word) in enumerate(entries) if word in answers]
    assert places != list(range(len(places))), "the list must be shuffled"


@pytest.mark.parametrize(
    ("length", "repeats", "example_repeats", "example_length"),
    [
        (1024, (6, 1), (3, 1), 40),
        (4095, (6, 1), (3, 1), 40),
        (4096, (30, 3), (10, 3), 190),
        (8192, (30, 3), (10, 3), 190),
    ],
)
def test_cwe_answers_and_solved_example_are_the_most_common_words(
    tokenizer, length, repeats, example_repeats, example_length
):
    sample = make_sample("cwe", tokenizer, length, 3)
    example, asked = (ENTRY.findall(line) for line in sample.prompt.split("\n") if line.startswith("1. "))
    [solved] = re.findall(r"in the list above are: (.+)$", sample.prompt, re.MULTILINE)
    check_word_list(example, {word for _, word in ENTRY.findall(solved)}, *example_repeats)
    check_word_list(asked, set(sample.answers), *repeats)
    assert len(example) == example_length


def test_word_pool_is_that_of_wonderwords_3_as_in_ruler():
    assert len(all_words()) == len(set(all_words())) == TASKS["cwe"].max_size == 8166


PROGRAM = """
from dualdecoder.checkpoints import load_tokenizer
from experiments.ruler_tasks import TASKS, make_sample
tokenizer = load_tokenizer("smollm2")
for name in reversed(TASKS):
    sample = make_sample(name, tokenizer, 1500, 7, seed=3)
    print(name, hash((sample.token_ids, len(sample.prompt))), *sample.answers, sep="|")
"""


def test_samples_are_equal_in_another_process(tokenizer):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "12345"}
    printed = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, env=environment)
    for name, line in zip(reversed(TASKS), printed.splitlines(), strict=True):
        sample = make_sample(name, tokenizer, 1500, 7, seed=3)
        assert line.split("|") == [name, str(hash((sample.token_ids, len(sample.prompt)))), *sample.answers]


@pytest.mark.parametrize("name", TASKS)
def test_length_index_and_seed_change_the_sample(tokenizer, name):
    sample = make_sample(name, tokenizer, 1024, 0)
    assert make_sample(name, tokenizer, 1024, 0, seed=42) == sample
    others = [(1024, 1, 42), (1024, 0, 1), (1025, 0, 42)]
    assert all(make_sample(name, tokenizer, *other).answers != sample.answers for other in others)


def test_distinct_draws_again_instead_of_repeating():
    rng = Random(0)
    drawn = distinct(80, lambda: random_number(rng, 2), taken={str(n) for n in range(90, 100)})
    assert sorted(drawn) == [str(n) for n in range(10, 90)]


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        (" 1234567.", ("1234567",), 100.0),
        ("123456", ("1234567",), 0.0),
        ("abcde FGHIJ", ("ABCDE", "FGHIJ", "KLMNO"), 200 / 3),
        ("", ("ABCDE",), 0.0),
        ("ABCDE", ("abcde",), 100.0),
        ("1. art 2. cart", ("cart", "art"), 100.0),
        ("two\x00\x1fwords", ("two\n\nwords",), 100.0),
        ("two\x1bwords", ("twowords",), 0.0),
    ],
)
def test_score(prediction, answers, expected):
    assert score(prediction, answers) == pytest.approx(expected)


@pytest.mark.parametrize("answers", [(), ("",), ("a", ""), "abc"])
def test_score_rejects_answers_that_cannot_be_scored(answers):
    with pytest.raises(ValueError, match="answers must be a sequence of one or more non-empty strings"):
        score("abc", answers)


def test_unknown_task_and_tokenizer_without_chat_template(tokenizer):
    with pytest.raises(ValueError, match=r"task must be one of niah_single_1, niah_multikey_2, vt, cwe, got 'qa_1'"):
        make_sample("qa_1", tokenizer, 4096, 0)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="tokenizer must have a chat template"):
        make_sample("vt", bare, 4096, 0)


@pytest.mark.parametrize("name", TASKS)
def test_too_small_a_length_names_the_smallest_prompt_of_the_task(tokenizer, name):
    text = (
        rf"^length must be at least \d+ tokens .* task '{name}' and its {NEW_TOKENS[name]} generated tokens, got 100$"
    )
    with pytest.raises(ValueError, match=text):
        make_sample(name, tokenizer, 100, 0)


def test_fit_respects_the_bounds_of_the_size_and_says_which_lengths_it_can_fill():
    def draw(size: int) -> RulerSample:
        assert 3 <= size <= 8
        return RulerSample("fake", 0, size, "", (0,) * (10 * size), ("a",), 5)

    task = RulerTask("fake", 5, lambda size, rng: None, min_size=3, max_size=8)
    assert [fit(draw, task, length).index for length in (35, 84)] == [3, 7]
    with pytest.raises(ValueError, match="length must be at least 35 tokens"):
        fit(draw, task, 34)
    with pytest.raises(ValueError, match="length must be at most 84 tokens"):
        fit(draw, task, 85)


def test_fit_does_not_creep_where_the_tokens_jump():
    def draw(size: int) -> RulerSample:
        return RulerSample("fake", 0, size, "", (0,) * (size if size <= 700 else 10**5), ("a",), 0)

    assert fit(draw, RulerTask("fake", 0, lambda size, rng: None, min_size=1), 900).index == 700
