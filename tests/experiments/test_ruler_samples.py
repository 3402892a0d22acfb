"""RULER samples as a whole: lengths, determinism, the cache, scoring, errors."""

import copy
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from dualdecoder.checkpoints import load_tokenizer
from dualdecoder.errors import ConfigError
from experiments.ruler_tasks import OFFLINE_TASKS, TASKS, DataFiles, RulerSample, RulerTask, Sampler, score
from experiments.ruler_tasks import samples as samples_module
from experiments.ruler_tasks.fitting import fit


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(load_tokenizer("smollm2"), folder=None)


def encoded_length(sampler: Sampler, sample: RulerSample) -> int:
    return len(sampler.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", OFFLINE_TASKS)
@pytest.mark.parametrize(("length", "share"), [(1024, 0.90), (2048, 0.95), (4096, 0.97), (8192, 0.98)])
def test_samples_fill_but_never_exceed_the_length(sampler: Sampler, name: str, length: int, share: float) -> None:
    for index in range(3):
        sample = sampler.sample(name, length, index)
        total = encoded_length(sampler, sample) + TASKS[name].new_tokens
        assert share * length <= total <= length
        assert sample.total_tokens == total


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(OFFLINE_TASKS), length=st.integers(1000, 5000), index=st.integers(0, 10**6))
def test_any_length_is_filled_up_to_one_unit_of_haystack(sampler: Sampler, name: str, length: int, index: int) -> None:
    sample = sampler.sample(name, length, index)
    assert length - 120 < encoded_length(sampler, sample) + TASKS[name].new_tokens <= length
    assert (sample.task, sample.length, sample.index) == (name, length, index)


def fake(size: int, tokens: int) -> RulerSample:
    return RulerSample("fake", 0, size, "", (0,) * tokens, ("a",), 0)


FAKE = RulerTask("fake", 0, lambda size, rng, request: None, min_size=1)


@settings(max_examples=200, deadline=None)
@given(
    first=st.integers(1, 500),
    steps=st.lists(st.integers(1, 60), min_size=1, max_size=400),
    room=st.integers(0, 20_000),
    min_size=st.integers(1, 20),
)
def test_fit_finds_the_largest_size_in_few_tries(first: int, steps: list[int], room: int, min_size: int) -> None:
    def total(size: int) -> int:
        return first + sum(steps[i % len(steps)] for i in range(min_size, size))

    drawn: list[int] = []

    def draw(size: int) -> RulerSample:
        drawn.append(size)
        return fake(size, total(size))

    chosen = fit(draw, dataclasses.replace(FAKE, min_size=min_size), first + room).index
    assert total(chosen) <= first + room < total(chosen + 1)
    assert len(drawn) <= 16 + 3 * 16


def test_fit_does_not_creep_where_the_tokens_jump_and_ends_where_they_do_not_grow() -> None:
    assert fit(lambda size: fake(size, size if size <= 700 else 10**5), FAKE, 900).index == 700
    with pytest.raises(ValueError, match="tokenizer must count more tokens for longer texts"):
        fit(lambda size: fake(size, 7), FAKE, 900)


@pytest.mark.parametrize("name", OFFLINE_TASKS)
def test_the_chat_template_wraps_the_question_and_the_prefix_follows_the_assistant_header(
    sampler: Sampler, name: str
) -> None:
    sample, tokenizer = sampler.sample(name, 1024, 0), sampler.tokenizer
    asked, answered = re.split(r"<\|im_start\|>user\n|<\|im_start\|>assistant\n", sample.prompt)[-2:]
    *examples, prefix = turned(tokenizer, sample.prompt)
    assert answered == prefix and asked.endswith("<|im_end|>\n")
    # cwe's worked example is a question in the template, too; that of vt stands in the user's turn.
    assert len(examples) == (name == "cwe")
    assert prefix.startswith(" ") and not prefix.startswith("  ")
    assert all(answer not in prefix for answer in sample.answers)
    assert tokenizer.decode(list(sample.token_ids), clean_up_tokenization_spaces=False) == sample.prompt
    header = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert sample.token_ids.count(header) == sample.prompt.count("<|im_start|>") == (6 if name == "cwe" else 3)


def turned(tokenizer, prompt: str) -> list[str]:
    """What is answered to each question of a prompt, which is checked to be the template around each of them."""
    questions = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n", prompt, re.DOTALL)
    answers = re.findall(r"<\|im_start\|>assistant\n(.*?)(?=<\|im_start\|>|<\|endoftext\|>|\Z)", prompt, re.DOTALL)
    wrapped = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in questions
    ]
    assert "".join(turn + answer for turn, answer in zip(wrapped, answers, strict=True)) == prompt
    return answers


def test_a_template_with_bos_and_without_system_prompt_is_filled_once_for_each_question(sampler: Sampler) -> None:
    """As NVIDIA fills that of Llama 3: twice for cwe, BOS included, and once around example and question of vt."""
    tokenizer = copy.deepcopy(sampler.tokenizer)
    tokenizer.chat_template = (
        "<|endoftext|>{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    plain = Sampler(tokenizer, folder=None)
    for name, questions in (("cwe", 2), ("vt", 1), ("fwe", 1), ("niah_single_1", 1)):
        prompt = plain.sample(name, 1024, 0).prompt
        assert prompt.count("<|endoftext|><|im_start|>user\n") == questions == prompt.count("<|im_start|>user")
        assert len(turned(tokenizer, prompt)) == questions
    example, asked = plain.sample("cwe", 1024, 0).prompt.split("<|endoftext|>")[1:]
    first = re.fullmatch(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n(.*)\n", example, re.DOTALL)
    second = re.fullmatch(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n(.*)", asked, re.DOTALL)
    assert first[2].startswith(f"{second[2]} 1. ") and first[2].count(". ") == 10, (
        "the example is answered, the question is not"
    )
    assert first[1].split("\n")[::2] == second[1].split("\n")[::2], "both are the same question about other lists"


def test_bos_is_not_doubled_by_a_tokenizer_that_adds_it(sampler: Sampler) -> None:
    adding = copy.deepcopy(sampler.tokenizer)
    bos = adding.convert_tokens_to_ids("<|endoftext|>")
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    adding.chat_template = "<|endoftext|>" + sampler.tokenizer.chat_template
    assert adding("x")["input_ids"][0] == bos, "the tokenizer of this test must add a BOS by itself"
    sample = Sampler(adding, folder=None).sample("niah_single_1", 1024, 0)
    assert [place for place, token in enumerate(sample.token_ids) if token == bos] == [0]


PROGRAM = """
from dualdecoder.checkpoints import load_tokenizer
from dualdecoder.errors import ConfigError
from experiments.ruler_tasks import OFFLINE_TASKS, Sampler
sampler = Sampler(load_tokenizer("smollm2"), folder=None)
for name in reversed(OFFLINE_TASKS):
    sample = sampler.sample(name, 1500, 7, seed=3)
    print(name, hash((sample.token_ids, len(sample.prompt))), *sample.answers, sep="|")
"""


def test_samples_are_equal_in_another_process(sampler: Sampler) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "12345"}
    printed = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, env=environment)
    for name, line in zip(reversed(OFFLINE_TASKS), printed.splitlines(), strict=True):
        sample = sampler.sample(name, 1500, 7, seed=3)
        assert line.split("|") == [name, str(hash((sample.token_ids, len(sample.prompt)))), *sample.answers]


@pytest.mark.parametrize("name", OFFLINE_TASKS)
def test_length_index_and_seed_change_the_sample(sampler: Sampler, name: str) -> None:
    sample = sampler.sample(name, 1024, 0)
    assert sampler.sample(name, 1024, 0, seed=42) == sample
    others = [(1024, 1, 42), (1024, 0, 1), (1025, 0, 42)]
    assert all(sampler.sample(name, *other).answers != sample.answers for other in others)


def test_a_kept_sample_is_not_made_again(sampler: Sampler, tmp_path: Path, monkeypatch) -> None:
    keeping = dataclasses.replace(sampler, folder=tmp_path)
    made = keeping.sample("vt", 1024, 5)
    monkeypatch.setattr(samples_module, "fit", lambda *arguments: pytest.fail("made again"))
    assert keeping.sample("vt", 1024, 5) == made


def test_what_a_sample_depends_on_is_in_its_name_and_a_broken_file_is_made_again(
    sampler: Sampler, tmp_path: Path, monkeypatch
) -> None:
    essays = tmp_path / "essays.txt"
    essays.write_text("Rain fell. Sun came. " * 9)
    other = copy.deepcopy(sampler.tokenizer)
    other.chat_template = "Well: " + sampler.tokenizer.chat_template
    keeping = [
        Sampler(sampler.tokenizer, folder=tmp_path),
        Sampler(other, folder=tmp_path),
        Sampler(sampler.tokenizer, DataFiles(essays=str(essays)), tmp_path),
    ]
    for one in keeping:
        one.sample("vt", 1024, 0)
    keeping[0].sample("vt", 1024, 0, seed=1)
    keeping[0].sample("vt", 1025, 0)
    monkeypatch.setattr(samples_module, "VERSION", 1)
    made = keeping[0].sample("vt", 1024, 0)
    paths = sorted(tmp_path.rglob("0.json"))
    assert len(paths) == 6
    for path in paths:
        path.write_text('{"prompt": "half a')
    assert keeping[0].sample("vt", 1024, 0) == made


@pytest.mark.parametrize(
    ("prediction", "answers", "share", "any_of_them"),
    [
        (" 1234567.", ("1234567",), 100.0, 100.0),
        ("123456", ("1234567",), 0.0, 0.0),
        ("abcde FGHIJ", ("ABCDE", "FGHIJ", "KLMNO"), 200 / 3, 100.0),
        ("France", ("France", "in France", "the Kingdom of France"), 100 / 3, 100.0),
        ("", ("ABCDE",), 0.0, 0.0),
        ("ABCDE", ("abcde",), 100.0, 100.0),
        ("1. art 2. cart", ("cart", "art"), 100.0, 100.0),
        ("two\x00\x1fwords", ("two\n\nwords",), 100.0, 100.0),
        ("two\x1bwords", ("twowords",), 0.0, 0.0),
    ],
)
def test_score(prediction: str, answers: tuple[str, ...], share: float, any_of_them: float) -> None:
    assert score(prediction, answers) == pytest.approx(share)
    assert score(prediction, answers, "any") == any_of_them


@pytest.mark.parametrize("answers", [(), ("",), ("a", ""), "abc"])
def test_score_rejects_answers_that_cannot_be_scored(answers) -> None:
    with pytest.raises(ValueError, match="answers must be a sequence of one or more non-empty strings"):
        score("abc", answers)


def test_unknown_task_and_tokenizer_without_chat_template(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match=r"task must be one of niah_single_1, .*, qa_2, got 'qa_3'"):
        sampler.sample("qa_3", 4096, 0)
    bare = copy.deepcopy(sampler.tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="tokenizer must have a chat template"):
        Sampler(bare)


def test_a_template_that_refuses_is_one_line(sampler: Sampler) -> None:
    refusing = copy.deepcopy(sampler.tokenizer)
    refusing.chat_template = "{{ raise_exception('only\\nwith tools') }}"
    with pytest.raises(ConfigError, match=r"^chat: the model's chat template refuses [^\n]*$"):
        Sampler(refusing, folder=None).sample("vt", 1024, 0)


@pytest.mark.parametrize("name", OFFLINE_TASKS)
def test_too_small_a_length_names_the_smallest_prompt_of_the_task(sampler: Sampler, name: str) -> None:
    tokens = TASKS[name].new_tokens
    text = rf"^length must be at least \d+ tokens .* task '{name}' and its {tokens} generated tokens, got 100$"
    with pytest.raises(ValueError, match=text):
        sampler.sample(name, 100, 0)
