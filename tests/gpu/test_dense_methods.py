"""Full KV and full offload on a GPU: the CPU's tokens and logits, and a graph equal to eager steps bit by bit."""

from dataclasses import replace

import pytest
import torch
from support import Trace, assert_bit_equal, sharpened

from dualdecoder import graphs
from dualdecoder.engine import Engine
from dualdecoder.method import method_config
from dualdecoder.model import random_decoder
from dualdecoder.shapes import SHAPES

pytestmark = pytest.mark.gpu
METHODS = ("full_kv", "full_offload")
STEPS = 24


def engine(device: str, method: str, layers: int = 4) -> Engine:
    model = sharpened(random_decoder(replace(SHAPES["tiny"], layers=layers)))
    return Engine(model.to(device, torch.float32), None, method, method_config(method, {}))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in (400, 333, 257)]


def trace(device: str, method: str, prompts: list[list[int]], layers: int = 4) -> Trace:
    result = Trace()
    for step in engine(device, method, layers).start(prompts, STEPS).steps:
        result.logits.append(step.logits_BV)
        result.tokens.append(step.token_B)
    return result


@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_logits_are_those_of_the_cpu(method: str, layers: int, prompts) -> None:
    """With an odd number of layers full offload swaps its buffers from step to step and runs eagerly."""
    expected, got = (trace(device, method, prompts, layers) for device in ("cpu", "cuda"))
    assert got.tokens == expected.tokens
    assert max((a.cpu() - b).abs().max() for a, b in zip(got.logits, expected.logits, strict=True)) < 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_graph_is_bit_equal_to_eager(method: str, prompts, monkeypatch) -> None:
    replayed = trace("cuda", method, prompts)
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 10**9)
    assert_bit_equal(replayed, trace("cuda", method, prompts))


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_what_the_ledger_says(method: str, prompts) -> None:
    chosen = engine("cuda", method)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run = chosen.start(prompts, 2)
    held = torch.cuda.memory_allocated() - before
    # The allocator rounds each tensor up to 512 bytes.
    assert run.method.ledger.plan().gpu_total == pytest.approx(held, rel=0.02)


def test_offloaded_steps_are_bit_equal_to_full_kv(prompts) -> None:
    """The same kernel over the same keys and values, wherever they are kept."""
    assert_bit_equal(trace("cuda", "full_offload", prompts), trace("cuda", "full_kv", prompts))
