"""A budget that covers the whole context makes DualDecoder equal full KV, also after chunks were flushed."""

import pytest
import torch
from support import start, trace

from dualdecoder.engine import Engine
from dualdecoder.prefill import prefill

TOLERANCE = 1e-3


def dense_logits(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Logits after every token from one dense pass, with no cache at all."""
    return engine.model.logits(prefill(engine.model, token_ids, lambda *_: None)[None])[0]


def test_smollm2_equals_dense(smollm2: Engine, manual) -> None:
    prompt = manual(700)
    run = start(smollm2, [prompt], 17, budget=1024)
    got = trace(run)
    new = [run.first_tokens[0], *(tokens[0] for tokens in got.tokens)]
    expected = dense_logits(smollm2, prompt + new)[len(prompt) : len(prompt) + 16]
    assert (torch.cat(got.logits) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("prompt_tokens", [1, 20, 150])
def test_generation_past_the_window(tiny: Engine, random_ids, prompt_tokens: int) -> None:
    """300 new tokens with a window of 64: the oldest leave the device, stay selectable, and nothing is lost."""
    prompt = random_ids(prompt_tokens)
    run = start(tiny, [prompt], 301, budget=512, window=64)
    prompt_chunks = int(run.method.chunks_B)
    got = trace(run)
    new = [run.first_tokens[0], *(tokens[0] for tokens in got.tokens)]
    expected = dense_logits(tiny, prompt + new)[len(prompt) : len(prompt) + 300]
    assert (torch.cat(got.logits) - expected).abs().max() < TOLERANCE
    assert torch.equal(expected.argmax(dim=-1), torch.tensor(new[1:]))
    chunks = int(run.method.chunks_B)
    assert chunks * 8 >= prompt_tokens + 300 - 64
    selected = set(got.selections[-1][0][0, 0].tolist()) - {-1}
    assert set(range(prompt_chunks, chunks - 1)) <= selected


@pytest.mark.slow
def test_generation_past_the_window_on_the_real_model(smollm2: Engine, manual) -> None:
    prompt = manual(500)
    run = start(smollm2, [prompt], 301, budget=1024, window=64)
    got = trace(run)
    new = [run.first_tokens[0], *(tokens[0] for tokens in got.tokens)]
    expected = dense_logits(smollm2, prompt + new)[len(prompt) : len(prompt) + 300]
    assert (torch.cat(got.logits) - expected).abs().max() < TOLERANCE


def test_flushed_chunks_are_selected_within_a_small_budget(tiny: Engine, random_ids) -> None:
    run = start(tiny, [random_ids(200)], 301, budget=64, window=64)
    prompt_chunks = int(run.method.chunks_B)
    selections = trace(run).selections
    later = torch.cat([torch.cat(layers).flatten() for layers in selections[-50:]])
    assert (later >= prompt_chunks).any()
    assert (later < prompt_chunks).any()


def test_ragged_batch_equals_single_sequences(tiny: Engine, random_ids) -> None:
    """Lengths differ, also across the first chunk; each sequence gets what it gets alone."""
    prompts = [random_ids(n, n) for n in (3, 41, 190, 256)]
    together = tiny.with_method("dualdecoder", budget=64).generate(prompts, max_new_tokens=90)
    for prompt, completion in zip(prompts, together, strict=True):
        alone = tiny.with_method("dualdecoder", budget=64).generate([prompt], max_new_tokens=90)[0]
        assert completion.token_ids == alone.token_ids
