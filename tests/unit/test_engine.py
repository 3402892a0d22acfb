"""The engine: streaming, stopping, ragged batches, snapshots, loading."""

import time

import pytest
import torch

from dualdecoder import Engine
from dualdecoder.model import Decoder
from dualdecoder.text import TextPieces


def test_stream_gives_the_same_text_as_generate(smollm2: Engine) -> None:
    prompts = ["The capital of France is", "Count: one, two, three,"]
    completions = smollm2.generate(prompts, max_new_tokens=12)
    texts, reasons = ["", ""], [None, None]
    for event in smollm2.stream(prompts, max_new_tokens=12):
        texts[event.sequence] += event.text
        reasons[event.sequence] = event.finish_reason
    assert texts == [c.text for c in completions]
    assert reasons == [c.finish_reason for c in completions]
    statistics = smollm2.statistics
    assert statistics.new_tokens == sum(len(c.token_ids) for c in completions)
    assert statistics.tokens_per_s == (statistics.new_tokens - 2) / statistics.decode_s
    assert statistics.prompt_tokens == sum(c.prompt_tokens for c in completions)


@pytest.mark.parametrize("method", ["full_kv", "dualdecoder"])
def test_each_sequence_stops_on_its_own(smollm2: Engine, method: str) -> None:
    """One answer is short, the other long; the short one ends in its stop token and the long one is not disturbed."""
    engine = smollm2.with_method(method)
    short = engine.chat("What is the capital of France? Answer with one word.")
    long = engine.chat("Write a long story about a dragon and a clever child.")
    together = engine.generate([short, long], max_new_tokens=40)
    assert together[0].finish_reason == "stop"
    assert together[0].token_ids[-1] in engine.stop_ids
    assert len(together[0].token_ids) < 40
    assert together[1].finish_reason == "length"
    assert len(together[1].token_ids) == 40
    assert together[1].token_ids == engine.generate([long], max_new_tokens=40)[0].token_ids


@pytest.mark.parametrize("method", ["full_kv", "dualdecoder"])
def test_one_snapshot_serves_many_runs(tiny: Engine, random_ids, method: str) -> None:
    prompt = random_ids(150)
    snapshot = tiny.prefill(prompt)
    engine = tiny.with_method(method)
    direct = engine.generate([prompt], max_new_tokens=10)[0].token_ids
    for _ in range(2):
        run = engine.resume([snapshot], 10)
        assert [*run.first_tokens, *(step.token_B[0] for step in run.steps)] == direct


def test_known_tokens_can_be_forced(tiny: Engine, random_ids) -> None:
    """A teacher's tokens replace the sampler's; logits are those of the given text."""
    prompt, given = random_ids(60), random_ids(8, 1)

    def teacher(logits_BRV: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        at = position_B[:, None] + 1 - len(prompt) + torch.arange(logits_BRV.shape[1])
        return torch.tensor(given)[at.clamp(max=len(given) - 1)]

    run = tiny.resume([tiny.prefill(prompt)], 8, choose=teacher)
    logits = torch.cat([step.logits_BV for step in run.steps])
    for i in range(1, 8):
        assert torch.allclose(logits[i - 1], tiny.prefill(prompt + given[:i]).logits_V, atol=1e-4)


@pytest.mark.parametrize("method", ["full_kv", "dualdecoder"])
def test_a_slow_reader_does_not_count_as_decoding(tiny: Engine, method: str) -> None:
    engine = tiny.with_method(method)
    begin = time.perf_counter()
    for _ in engine.stream([[1, 2, 3]], max_new_tokens=5):
        time.sleep(0.2)
    assert 0 < engine.statistics.decode_s < time.perf_counter() - begin - 5 * 0.2 + 0.01


def test_a_second_load_converts_nothing(smollm2: Engine, monkeypatch) -> None:
    monkeypatch.setattr("gguf.dequantize", None)
    again = Engine.from_pretrained("smollm2")
    assert torch.equal(again.model.layers[-1].down_EF, smollm2.model.layers[-1].down_EF)


def test_text_pieces_hold_back_half_characters(smollm2: Engine) -> None:
    text = "naïve café \U0001f600\U0001f680 日本語 end"
    ids = smollm2.tokenizer(text).input_ids
    pieces = TextPieces(smollm2.tokenizer)
    given = [pieces.add(token) for token in ids]
    assert "" in given
    assert all("\ufffd" not in piece for piece in given)
    assert "".join(given) + pieces.rest() == text
    broken = TextPieces(smollm2.tokenizer)
    emoji = smollm2.tokenizer("\U0001f600").input_ids
    assert broken.add(emoji[0]) == ""
    assert broken.rest() == "\ufffd"


def test_engine_plan_includes_the_weights(smollm2: Engine) -> None:
    plan = smollm2.plan(2, 1000)
    assert plan.gpu["weights"] == smollm2.model.weight_bytes()
    assert plan.gpu["kv"] == 2 * 1000 * 30 * 3 * 2 * 64 * 4


def test_registered_by_dotted_path(tiny: Engine, random_ids) -> None:
    prompt = random_ids(40)
    named, dotted = (tiny.with_method(name) for name in ("full_kv", "baselines.full_kv:FullKV"))
    assert named.generate([prompt], 5) == dotted.generate([prompt], 5)


def test_a_prefill_asks_for_the_keys_before_their_rotation(tiny: Engine, monkeypatch) -> None:
    """However short the prompt: on a GPU a step's one or two rows overwrite them."""
    asked: list[bool] = []
    project = Decoder.project

    def watched(self: Decoder, *arguments, keeps_pre_rope: bool = False):
        asked.append(keeps_pre_rope)
        return project(self, *arguments, keeps_pre_rope=keeps_pre_rope)

    monkeypatch.setattr(Decoder, "project", watched)
    tiny.prefill([1])
    assert asked == [True] * tiny.model.config.layers
