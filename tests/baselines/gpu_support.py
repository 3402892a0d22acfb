"""The same run on a CPU and on a GPU, eager and from a graph."""

from __future__ import annotations

import pytest
import torch
from support import sharpened
from torch import Tensor

from dualdecoder import graphs
from dualdecoder.checkpoints import load_model
from dualdecoder.config import ModelConfig
from dualdecoder.engine import Engine
from dualdecoder.method import method_class, method_config
from dualdecoder.model import random_decoder
from dualdecoder.step import decode_step

STEPS = 40


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in (400, 333, 57)]


def run(device: str, method: str, options: dict, eager: bool = False) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens and logits (on the CPU) of 40 steps of the sharpened tiny model in fp32."""
    model = sharpened(load_model("random:tiny")).to(device, torch.float32)
    engine = Engine(model, None, method, method_config(method, options))
    tokens, logits = [], []
    with pytest.MonkeyPatch.context() as patch:
        if eager:
            patch.setattr(graphs, "WARMUP_STEPS", 10**9)
        for step in engine.start(prompts(), STEPS).steps:
            tokens.append(step.token_B)
            logits.append(step.logits_BV.cpu())
    return tokens, logits


def check_gpu(method: str, options: dict) -> None:
    """Tokens and, to rounding, logits of the CPU; from a graph bit by bit those of an eager run."""
    assert method_class(method).graphable
    expected = run("cpu", method, options)
    eager, graph = (run("cuda", method, options, eager) for eager in (True, False))
    assert eager[0] == expected[0]
    assert max((a - b).abs().max() for a, b in zip(eager[1], expected[1], strict=True)) < 1e-3
    assert graph[0] == eager[0]
    assert all(torch.equal(a, b) for a, b in zip(graph[1], eager[1], strict=True))


def check_synthetic(method: str, options: dict, tokens: int) -> None:
    """Filled without a prompt, steps at 8B shapes run; the plan is what gets allocated."""
    shape = ModelConfig("four-layers", 4, 4096, 14336, 32, 8, 128, 1000, 131072)
    sizes = {"batch": 2, "context": tokens + 8, "dtype": torch.bfloat16}
    config = method_config(method, options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = method_class(method)(shape, config, **sizes, device="cuda")
    held = torch.cuda.memory_allocated() - before
    assert made.ledger.plan() == method_class(method).plan(shape, config, **sizes, device_type="cuda")
    # The allocator rounds each tensor up to 512 bytes.
    assert made.ledger.plan().gpu_total == pytest.approx(held, rel=0.02)
    made.fill_synthetic(tokens)
    model = random_decoder(shape, torch.bfloat16, "cuda")
    everyone = torch.ones(2, dtype=torch.bool, device="cuda")
    for _ in range(3):
        tokens_B1 = torch.ones(2, 1, dtype=torch.int64, device="cuda")
        assert decode_step(model, made, tokens_B1, made.length_B.clone(), everyone).isfinite().all()
    assert made.length_B.tolist() == [tokens + 3] * 2
