"""What RULER's samples hold, task by task, checked by readers that share no code with the generators."""

import re
from collections import Counter
from pathlib import Path
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualdecoder.checkpoints import load_tokenizer
from dualdecoder.errors import ConfigError
from experiments.ruler_tasks import OFFLINE_TASKS, TASKS, DataFiles, NoData, RulerSample, Sampler
from experiments.ruler_tasks import questions as qa
from experiments.ruler_tasks.material import Material
from experiments.ruler_tasks.task import Request
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import all_words

DATA = Path(__file__).resolve().parents[1] / "data" / "qa"
FILES = DataFiles(squad=str(DATA / "squad.json"), hotpot=str(DATA / "hotpot.json"))
NEEDLE = re.compile(r"magic (\w+) for (\S.*?) is: ([\w-]+)\.")
ENTRY = re.compile(r"(?<!\S)(\d+)\. (.+?)(?= \d+\. |$)", re.MULTILINE)
NUMBER, KEY = r"[1-9]\d{6}", r"\S.*-.*\S"
# task: keys, values a key, keys asked for, kind of value, pattern of keys, needles that fill the haystack
VARIANTS = {
    "niah_single_1": (1, 1, 1, "numbers", KEY, False),
    "niah_single_2": (1, 1, 1, "numbers", KEY, False),
    "niah_single_3": (1, 1, 1, "uuids", KEY, False),
    "niah_multikey_1": (4, 1, 1, "numbers", KEY, False),
    "niah_multikey_2": (1, 1, 1, "numbers", KEY, True),
    "niah_multikey_3": (1, 1, 1, "uuids", "uuid", True),
    "niah_multivalue": (1, 4, 1, "numbers", KEY, False),
    "niah_multiquery": (4, 1, 4, "numbers", KEY, False),
}


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_tokenizer("smollm2"), FILES, folder=None)


def turns(sample: RulerSample) -> tuple[str, str]:
    """The user's last text and the opening of the answer."""
    head, prefix = sample.prompt.rsplit("<|im_start|>assistant\n", 1)
    return head.split("<|im_start|>user\n")[-1].removesuffix("<|im_end|>\n"), prefix


def test_the_13_tasks_have_rulers_names_and_generated_tokens() -> None:
    tokens = dict.fromkeys(VARIANTS, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert {name: task.new_tokens for name, task in TASKS.items()} == tokens
    assert all(task.name == name for name, task in TASKS.items())
    assert [name for name in TASKS if name not in OFFLINE_TASKS] == ["qa_1", "qa_2"]
    assert {name for name, task in TASKS.items() if task.match == "any"} == {"qa_1", "qa_2"}


def is_kind(kind: str, text: str) -> bool:
    return UUID(text).version == 4 if kind.startswith("uuid") else re.fullmatch(NUMBER, text) is not None


@pytest.mark.parametrize("name", VARIANTS)
def test_needles(sampler: Sampler, name: str) -> None:
    keys, values, queries, kind, key_kind, filled = VARIANTS[name]
    for index in range(6):
        sample = sampler.sample(name, 2048, index)
        question, prefix = turns(sample)
        found = NEEDLE.findall(question)
        assert {named for named, _, _ in found} == {kind}, "the needle stays in the plural"
        assert len(found) > 15 if filled else len(found) == keys * values
        asked = re.split(r", and |, ", re.search(r" for (.+) mentioned", prefix)[1])
        assert len(asked) == queries
        assert sorted(value for _, key, value in found if key in asked) == sorted(sample.answers)
        assert len(sample.answers) == len(set(sample.answers)) == values * queries
        assert all(is_kind(kind, value) for _, _, value in found)
        if key_kind == "uuid":
            assert all(is_kind(key_kind, key) for _, key, _ in found)
        else:
            assert all(re.fullmatch(key_kind, key) for _, key, _ in found)
        assert len({value for _, _, value in found}) == len(found)


@pytest.mark.parametrize(("name", "singular"), [("niah_single_3", True), ("niah_multivalue", False)])
def test_one_value_is_asked_for_in_the_singular(sampler: Sampler, name: str, singular: bool) -> None:
    question, prefix = turns(sampler.sample(name, 1024, 0))
    words = (
        ("A special", "is hidden", "What is the") if singular else ("Some special", "are hidden", "What are all the")
    )
    first, last = question.split("\n")[0], question.split("\n")[-1]
    assert first.startswith(words[0]) and words[1] in first and last.startswith(words[2])
    assert prefix.startswith(" The special magic uuid for " if singular else " The special magic numbers for ")
    assert prefix.endswith(" is" if singular else " are")
    assert "You are a helpful" in sampler.sample(name, 1024, 0).prompt, "the model's template stays as it is"


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_needles_lie_at_all_depths(sampler: Sampler, name: str) -> None:
    samples = [sampler.sample(name, 1024, index) for index in range(60)]
    quarters = Counter(4 * s.prompt.index(s.answers[0]) // len(s.prompt) for s in samples)
    assert all(quarters[quarter] >= 4 for quarter in range(4)), quarters


def test_haystacks_are_noise_lines_or_prose(sampler: Sampler) -> None:
    noise = turns(sampler.sample("niah_single_1", 2048, 0))[0].split("\n")[1:-1]
    assert set(Counter(noise).values()) == {1, len(noise) - 1}
    assert max(Counter(noise), key=Counter(noise).get) == wording().noise
    prose = turns(sampler.sample("niah_single_2", 2048, 0))[0].split("\n")[1:-1]
    assert len(prose) == 1
    words = NEEDLE.sub("", prose[0]).replace("One of the special ", "").split()
    assert words == Material.of(sampler.tokenizer).essay_words(len(words))


def test_essays_repeat_and_can_be_given_as_a_file(sampler: Sampler, tmp_path: Path) -> None:
    text = tmp_path / "essays.txt"
    text.write_text("One day it rained.\n\nThe next  day it did not.\n")
    files = DataFiles(essays=str(text))
    # Ten words: the text starts again after them.
    assert Material.of(sampler.tokenizer, files).essay_words(12)[9:] == ["not.", "One", "day"]
    question, _ = turns(Sampler(sampler.tokenizer, files, folder=None).sample("niah_single_2", 1024, 0))
    assert question.count("One day it rained.") > 40
    with pytest.raises(ConfigError, match=r"data\.essays='nowhere\.txt' is not a file; allowed: a path, or hub:"):
        Material.of(sampler.tokenizer, DataFiles(essays="nowhere.txt")).essay_words(1)
    with pytest.raises(ConfigError, match=r"data\.essays='hub:one' is not understood"):
        Material.of(sampler.tokenizer, DataFiles(essays="hub:one")).essay_words(1)


def run_assignments(text: str) -> dict[str, list[str]]:
    """Execute the assignments in order; return each value with the names that hold it."""
    values: dict[str, str] = {}
    for target, source in re.findall(r"^VAR (\w+) = (.+)$", text, re.MULTILINE):
        assert target not in values, "a variable is assigned once"
        values[target] = values[source.removeprefix("VAR ").strip()] if source.startswith("VAR ") else source
    holders: dict[str, list[str]] = {}
    for name, value in values.items():
        holders.setdefault(value, []).append(name)
    return holders


def test_vt_answers_hold_the_asked_value_and_the_example_is_solved_rightly(sampler: Sampler) -> None:
    examples = set()
    for index in range(6):
        sample = sampler.sample("vt", 2048, index)
        [(value, solved), (asked, rest)] = re.findall(
            r"5 variables are assigned the value (\d+), they are: (.*)", sample.prompt
        )
        holders = run_assignments(sample.prompt)
        assert rest == "" and sample.prompt.endswith("they are: ")
        assert set(holders) == {value, asked}
        assert holders[value] == solved.split()
        assert sorted(holders[asked]) == sorted(sample.answers)
        assert [len(name) for names in holders.values() for name in names] == [3] * 5 + [5] * 5
        assert all(re.fullmatch(r"[1-9]\d{4}", number) for number in (value, asked))
        example = turns(sample)[0].split("\n\nMemorize")[0]
        assert 440 < Material.of(sampler.tokenizer).count(example) <= 520
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
    sampler: Sampler, length: int, repeats: tuple[int, int], example_repeats: tuple[int, int], example_length: int
) -> None:
    sample = sampler.sample("cwe", length, 3)
    example, asked = (ENTRY.findall(line) for line in sample.prompt.split("\n") if line.startswith("1. "))
    [solved] = re.findall(r"in the list are: (.+)$", sample.prompt, re.MULTILINE)
    check_word_list(example, {word for _, word in ENTRY.findall(solved)}, *example_repeats)
    check_word_list(asked, set(sample.answers), *repeats)
    assert len(example) == example_length


@pytest.mark.parametrize("length", [1024, 4096])
def test_fwe_answers_are_ranks_two_to_four_of_a_zeta_distribution(sampler: Sampler, length: int) -> None:
    sample = sampler.sample("fwe", length, 1)
    words = turns(sample)[0].split("coded words. ")[1].split("\nQuestion:")[0].split(" ")
    counts = Counter(words)
    ranked = [word for word, _ in counts.most_common(5)]
    assert ranked[0] == "..." and set(ranked[1:4]) == set(sample.answers)
    assert counts[ranked[3]] > counts[ranked[4]]
    assert all(re.fullmatch(r"[a-z]{6}", word) for word in counts if word != "...")
    share = [counts[word] / counts["..."] for word in ranked[1:4]]
    assert share == pytest.approx([1 / 4, 1 / 9, 1 / 16], abs=0.02)
    assert len(set(words[:20])) > 1, "the text must be shuffled"


@pytest.mark.parametrize(("length", "words"), [(1024, 19), (2000, 39), (4096, 80), (4149, 81), (4150, 82), (300, 5)])
def test_fwe_has_a_word_for_every_50_tokens_of_the_prompt(sampler: Sampler, length: int, words: int) -> None:
    """As in NVIDIA's code, which takes the 50 generated tokens off the length first; a huge text holds every rank."""
    draft = TASKS["fwe"].build(100_000, Random(1), Request(length, 0, Material.of(sampler.tokenizer)))
    text = draft.question.split("coded words. ")[1].split("\nQuestion:")[0].split(" ")
    assert len(set(text)) == words and "..." in text


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_questions_stand_between_documents_that_hold_the_answer(sampler: Sampler, task: str) -> None:
    for index in range(3):
        sample = sampler.sample(task, 1024, index)
        question, prefix = turns(sample)
        documents = re.split(r"Document (\d+):\n", question)[1:]
        assert [int(number) for number in documents[::2]] == list(range(1, len(documents) // 2 + 1))
        texts = [text.split("\n\nAnswer the question")[0].strip() for text in documents[1::2]]
        # The pools of these small files repeat.
        assert len(texts) > len(set(texts)) > 3
        assert prefix == " Answer:"
        if sample.answers != ("yes",):
            assert any(answer in text for text in texts for answer in sample.answers)
        assert question.count("Only give me the answer") == 2


def test_unanswerable_questions_are_left_out_and_gold_strings_kept() -> None:
    squad, hotpot = qa.load("squad", FILES.squad), qa.load("hotpot", FILES.hotpot)
    assert [question.answers for question in squad.questions][:2] == [
        ("1731", "in 1731"),
        ("a brass bell", "brass bell", "bell"),
    ]
    assert len(squad.questions) == 5 and len(squad.documents) == 5
    assert [len(question.related) for question in squad.questions] == [2, 2, 2, 1, 1]
    # One paragraph belongs to two questions and stands in the pool once.
    assert len(hotpot.documents) == 8
    assert [question.answers for question in hotpot.questions] == [("Quillen",), ("cello",), ("yes",)]


@given(size=st.integers(1, 30), seed=st.integers())
def test_own_documents_come_first_then_related_then_any_then_all_again(size: int, seed: int) -> None:
    question = qa.Question("?", ("a",), (3,), (1, 4))
    chosen = qa._choose(size, question, 7, Random(seed))
    assert len(chosen) == size and 3 in chosen
    distinct_numbers = set(chosen)
    assert len(distinct_numbers) == min(size, 7)
    if size <= 3:
        assert distinct_numbers <= {1, 3, 4}
    else:
        assert {1, 3, 4} <= distinct_numbers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is not in the JSON form of SQuAD"),
        ("{", "is not in the JSON form"),
        ('{"data": []}', "holds no question"),
    ],
)
def test_a_file_that_is_not_squad(sampler: Sampler, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "squad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Sampler(sampler.tokenizer, DataFiles(squad=str(path)), folder=None).sample("qa_1", 1024, 0)


def test_question_tasks_without_a_file_have_no_data_and_a_file_has_an_end(sampler: Sampler) -> None:
    with pytest.raises(NoData, match=r"task 'qa_2' has no data: data\.hotpot is empty"):
        Sampler(sampler.tokenizer, folder=None).sample("qa_2", 1024, 0)
    with pytest.raises(ConfigError, match=r"samples: data\.hotpot holds 3 questions"):
        sampler.sample("qa_2", 1024, 3)
