"""The real model on a GPU against the same model on the CPU."""

import pytest
import torch
from support import start

from dualdecoder.engine import Engine
from dualdecoder.method import method_config

pytestmark = pytest.mark.gpu
OPTIONS = {"budget": 256}


def on_gpu(engine: Engine, dtype: torch.dtype) -> Engine:
    config = method_config("dualdecoder", OPTIONS)
    return Engine(engine.model.to("cuda", dtype), engine.tokenizer, "dualdecoder", config)


def test_greedy_tokens_equal_the_cpu(smollm2: Engine, manual) -> None:
    prompts = [manual(1500), manual(700)]
    expected = smollm2.with_method("dualdecoder", **OPTIONS).generate(prompts, max_new_tokens=64)
    got = on_gpu(smollm2, torch.float32).generate(prompts, max_new_tokens=64)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_bf16_logits_are_within_rounding(smollm2: Engine, manual) -> None:
    """Teacher-forced over 32 steps: bf16 has 8 bits, so logits of spread 1 differ by a few hundredths."""
    prompt = manual(1532)

    def known(logits_BRV: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        at = position_B[:, None].cpu() + 1 + torch.arange(logits_BRV.shape[1])
        return torch.tensor(prompt)[at.clamp(max=len(prompt) - 1)].to(logits_BRV.device)

    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = on_gpu(smollm2, dtype)
        run = engine.resume([engine.prefill(prompt[:1500])], 32, choose=known)
        logits[dtype] = torch.cat([step.logits_BV for step in run.steps])
    exact, rounded = logits[torch.float32], logits[torch.bfloat16]
    assert (rounded - exact).norm() / exact.norm() < 0.03


def test_memory_is_what_the_ledger_says(smollm2: Engine, manual) -> None:
    engine = on_gpu(smollm2, torch.bfloat16)
    # The first products take workspaces that stay.
    start(engine, [manual(512)], 2, **OPTIONS)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run = start(engine, [manual(512)], 2, **OPTIONS)
    held = torch.cuda.memory_allocated() - before
    # The allocator rounds each tensor up to 512 bytes.
    assert run.method.ledger.plan().gpu_total == pytest.approx(held, rel=0.02)
