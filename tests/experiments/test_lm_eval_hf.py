"""Equality with lm-eval's own `hf` on the same weights: what is cut, windowed, stopped and refused."""

import copy
import dataclasses
from functools import partial
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM

from dualdecoder.checkpoints import resolve
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError, ContextError
from experiments.lm_eval_model import DualDecoderLM

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "lm_eval"
METHODS = {"full_kv": {}, "dualdecoder": {"budget": 512}, "streaming_llm": {}}
STORY = "One day a small grey cat walked along the river and met a dog, who asked it where it was going so early. "
BOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def weights(folder: Path):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(str(folder), method="full_kv")


def request(kind: str, *arguments: object) -> Instance:
    return Instance(kind, {}, tuple(arguments), 0)


def scored(*pairs: tuple[str, str]) -> list[Instance]:
    return [request("loglikelihood", *pair) for pair in pairs]


def generated(*texts: str, **options: object) -> list[Instance]:
    return [request("generate_until", text, {"do_sample": False, **options}) for text in texts]


class Both:
    """`hf` and ours with the same weights, tokenizer and context."""

    def __init__(self, weights, engine: Engine, context: int | None = None, tokenizer=None, batch: int = 1) -> None:
        tokenizer = tokenizer or engine.tokenizer
        model = engine.model
        if context:
            model = dataclasses.replace(model, config=dataclasses.replace(model.config, max_context=context))
        self.hf = HFLM(pretrained=weights, tokenizer=tokenizer, max_length=context, device="cpu", batch_size=batch)
        self.full = Engine(model, tokenizer, "full_kv", engine.config, engine.stop_ids)
        self.batch = batch

    def ours(self, method: str = "full_kv") -> DualDecoderLM:
        return DualDecoderLM(engine=self.full.with_method(method, **METHODS[method]), batch_size=self.batch)

    def text(self, tokens: int) -> str:
        """A text of as many tokens."""
        ids = self.full.tokenizer(STORY * (tokens // 20 + 1), add_special_tokens=False).input_ids[:tokens]
        text = self.full.tokenizer.decode(ids)
        assert len(self.full.tokenizer(text, add_special_tokens=False).input_ids) == tokens
        return text


def same_scores(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-3)


@pytest.mark.parametrize("batch", [1, 4])
def test_three_tasks_give_the_same_answers_and_metrics(smollm2: Engine, batch: int, monkeypatch) -> None:
    """With a model that can answer: log-likelihoods, rolling log-likelihoods and generated text."""
    monkeypatch.chdir(ROOT)
    real = LlamaForCausalLM.from_pretrained(resolve("smollm2"), dtype=torch.float32).eval()
    both = Both(real, smollm2, batch=batch)
    tasks = ["everyday", "everyday_text", "everyday_answer"]
    ours, theirs = (
        lm_eval.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=TaskManager(include_path=str(DATA), include_defaults=False),
            bootstrap_iters=0,
            limit=8,
        )
        for model in (both.ours(), both.hf)
    )
    for task in tasks:
        mine, its = (sorted(found["samples"][task], key=lambda item: item["doc_id"]) for found in (ours, theirs))
        answers = [[answer for item in items for answer in item["filtered_resps"]] for items in (mine, its)]
        assert len(answers[0]) >= 8
        if task == "everyday_answer":
            assert (
                answers[0] == answers[1] and len(set(answers[0])) > 3 and not any("\n" in text for text in answers[0])
            )
        else:
            torch.testing.assert_close(*map(torch.tensor, answers), atol=1e-3, rtol=0)
        for name, value in theirs["results"][task].items():
            assert ours["results"][task][name] == (
                pytest.approx(value, rel=1e-3) if isinstance(value, float) else value
            )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_rolling_windows_are_as_long_as_the_context(weights, engine: Engine, method: str, batch: int) -> None:
    both = Both(weights, engine, context=16, batch=batch)
    lengths = [1, 15, 16, 17, 18, 31, 32, 33, 50]
    texts = [request("loglikelihood_rolling", text) for text in ("", " ", *map(both.text, lengths))]
    theirs = both.hf.loglikelihood_rolling(texts, disable_tqdm=True)
    assert both.ours(method).loglikelihood_rolling(texts) == pytest.approx(theirs, abs=1e-2)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_long_contexts_are_cut_from_the_left_as_by_hf(weights, engine: Engine, method: str, batch: int) -> None:
    """16 inputs, so 17 tokens, are scored uncut; one token stands before a continuation as long as the context."""
    both = Both(weights, engine, context=16, batch=batch)
    pairs = scored(
        *((both.text(tokens), " and then") for tokens in (1, 13, 14, 15, 16, 17, 40)),
        *((both.text(tokens), " it") for tokens in (15, 16, 17)),
        *((both.text(tokens), " of" * 16) for tokens in (1, 2, 9)),
        (both.text(3), " of" * 13),
    )
    same_scores(both.ours(method).loglikelihood(pairs), both.hf.loglikelihood(pairs, disable_tqdm=True))


def test_a_cut_is_said(engine: Engine, weights, caplog) -> None:
    both = Both(weights, engine, context=16)
    caplog.clear()
    both.ours().loglikelihood(scored((both.text(16), " it")))
    assert not caplog.records
    both.ours().loglikelihood(scored((both.text(20), " it")))
    assert "context of 20 tokens: the first 4 are cut" in caplog.text


REFUSED = [
    ("Hello", "", "continuation='' is not allowed; allowed: a text of at least one token"),
    ("Hel", "lo", "continuation='lo' is not allowed"),
    (" ", "Hello", "context=' ' is not allowed; allowed: a text of at least one token"),
    ("\n \n", "Hello", r"context='\\n \\n' is not allowed"),
    ("", "", "continuation='' is not allowed"),
    ("", "<|im_start|>", "continuation='<|im_start|>' is not allowed"),
    ("Hello", " of" * 17, "continuation: 17 tokens exceed the model's context; allowed: at most 16"),
]


@pytest.mark.parametrize(("context", "continuation", "message"), REFUSED)
def test_what_hf_asserts_is_one_line_and_the_same_for_every_method(
    weights, engine: Engine, context: str, continuation: str, message: str
) -> None:
    both = Both(weights, engine, context=16)
    with pytest.raises((AssertionError, IndexError)):
        both.hf.loglikelihood(scored((context, continuation)), disable_tqdm=True)
    said = set()
    for method in METHODS:
        with pytest.raises((ConfigError, ContextError), match=message.replace("|", r"\|")) as caught:
            both.ours(method).loglikelihood(scored((" x", " y"), (context, continuation)))
        said.add(str(caught.value))
    assert len(said) == 1 and "\n" not in said.pop()


def test_an_empty_context_is_the_prefix_token_and_spaces_belong_to_the_continuation(weights, engine: Engine) -> None:
    both = Both(weights, engine)
    pairs = scored(("", "Hello"), ("", " there you are"), ("", "<|im_start|>user"), ("A cat  ", ""), ("A cat ", "sits"))
    for method in METHODS:
        same_scores(both.ours(method).loglikelihood(pairs), both.hf.loglikelihood(pairs, disable_tqdm=True))


SPECIAL = "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"until": ["\n"], "max_gen_toks": 8},
        {"until": [], "max_gen_toks": 8},
        {"until": ["assistant"], "max_gen_toks": 8},
        {"until": "ch", "max_gen_toks": 20},
        {"until": [""], "max_gen_toks": 8},
        {"max_new_tokens": 6},
    ],
)
def test_generated_text_is_that_of_hf(weights, engine: Engine, options: dict, batch: int) -> None:
    both = Both(weights, engine, batch=batch)
    texts = generated(SPECIAL, "The capital of France is", f"{SPECIAL}<|im_start|>assistant\n", STORY, " ", **options)
    theirs = both.hf.generate_until(texts, disable_tqdm=True)
    assert both.ours().generate_until(texts) == theirs
    assert not any("<|im_" in text for text in theirs)


def test_a_special_token_as_stop_string_stops_where_it_is_generated(weights, engine: Engine) -> None:
    """It is not in the text, in which alone nothing would stop. Of one sequence: `hf` goes on while others run."""
    both, tokenizer = Both(weights, engine), engine.tokenizer
    [free] = engine.generate([STORY], 20)
    first = next(token for token in free.token_ids if token not in tokenizer.all_special_ids)
    tail = free.token_ids[free.token_ids.index(first) :]
    stop = next(
        t for t in tail if t in tokenizer.all_special_ids and free.token_ids.index(t) > free.token_ids.index(first)
    )
    place = free.token_ids.index(stop)
    text = partial(tokenizer.decode, skip_special_tokens=True)
    texts = generated(STORY, until=[tokenizer.decode(stop)], max_gen_toks=20)
    theirs = both.hf.generate_until(texts, disable_tqdm=True)
    assert both.ours().generate_until(texts) == theirs == [text(free.token_ids[:place])]
    assert text(free.token_ids[place:]), "there is more to come"


@pytest.mark.parametrize("stops", [["sits", "r s"], ["r s", "sits"], ["s", "sits"]])
def test_stops_that_overlap_are_cut_in_their_order(stops: list[str], engine: Engine, monkeypatch) -> None:
    """As `hf` does, which cuts at one stop string after the other."""
    text = "So. The r sits on a bank."
    expected = {"sits": "So. The r ", "r s": "So. The ", "s": "So. The r "}[stops[0]]
    ids = engine.tokenizer(text).input_ids
    monkeypatch.setattr(Engine, "stream", lambda *a: iter([_Event(0, token, None) for token in ids]))
    found = DualDecoderLM(engine=engine).generate_until(generated("x", until=stops, max_gen_toks=30))
    assert found == [expected]


@dataclasses.dataclass
class _Event:
    sequence: int
    token_id: int
    finish_reason: str | None


def test_a_stop_id_that_is_no_special_token_stays_in_the_text_as_with_hf(weights, engine: Engine, monkeypatch) -> None:
    prompt = "The capital of France is"
    [free] = engine.generate([prompt], 6)
    stop = next(token for token in free.token_ids[1:] if token not in engine.tokenizer.all_special_ids)
    monkeypatch.setattr(weights.generation_config, "eos_token_id", [2, stop])
    both = Both(weights, Engine(engine.model, engine.tokenizer, "full_kv", engine.config, {2, stop}))
    theirs = both.hf.generate_until(generated(prompt, max_gen_toks=6), disable_tqdm=True)
    assert both.ours().generate_until(generated(prompt, max_gen_toks=6)) == theirs
    ended = free.token_ids[: free.token_ids.index(stop) + 1]
    assert theirs == [engine.tokenizer.decode(ended, skip_special_tokens=True)] and len(ended) < 6


@pytest.mark.parametrize("method", METHODS)
def test_a_long_prompt_is_cut_to_leave_room_for_the_answer(weights, engine: Engine, method: str) -> None:
    both = Both(weights, engine, context=24)
    texts = generated(both.text(17), both.text(18), both.text(19), both.text(90), until=[], max_gen_toks=6)
    assert both.ours(method).generate_until(texts) == both.hf.generate_until(texts, disable_tqdm=True)
    one = generated("Hello", until=[], max_gen_toks=23)
    assert both.ours(method).generate_until(one) == both.hf.generate_until(one, disable_tqdm=True)
    with pytest.raises(AssertionError):
        both.hf.generate_until(generated("Hello", max_gen_toks=24), disable_tqdm=True)
    with pytest.raises(ConfigError, match=r"gen_kwargs.max_gen_toks=24 is not allowed; allowed: from 1 to 23"):
        both.ours(method).generate_until(generated("Hello", max_gen_toks=24))


@pytest.fixture(scope="module")
def adding(engine: Engine):
    """A tokenizer that puts a token before every text, as that of Llama does."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.convert_tokens_to_ids(BOS))]
    )
    tokenizer.bos_token = BOS
    return tokenizer


@pytest.mark.parametrize("batch", [1, 4])
def test_a_tokenizer_that_adds_a_token_before_every_text(weights, engine: Engine, adding, batch: int) -> None:
    both = Both(weights, engine, context=24, tokenizer=adding, batch=batch)
    pairs = scored(("A cat", " sits"), (f"{BOS}A cat", " sits"), ("", "Hello there"), (" ", "Hello"), (STORY, " early"))
    same_scores(both.ours().loglikelihood(pairs), both.hf.loglikelihood(pairs, disable_tqdm=True))
    rolling = [request("loglikelihood_rolling", text) for text in ("A cat sits.", STORY * 2, f"{BOS}A cat", "")]
    theirs = both.hf.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert both.ours().loglikelihood_rolling(rolling) == pytest.approx(theirs, abs=1e-2)
    for texts in (generated("A cat", STORY, max_gen_toks=6), generated(f"{BOS}A cat", max_gen_toks=6)):
        assert both.ours().generate_until(texts) == both.hf.generate_until(texts, disable_tqdm=True)
