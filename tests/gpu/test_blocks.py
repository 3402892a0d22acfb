"""Quest and OasisKV on a GPU: the CPU's tokens and logits, the same bits eager and from a graph, planned memory."""

import pytest
import torch
from support import sharpened

from dualdecoder import graphs
from dualdecoder.checkpoints import load_model
from dualdecoder.config import ModelConfig, dtype_from_name
from dualdecoder.engine import Engine
from dualdecoder.method import method_class, method_config
from dualdecoder.model import random_decoder
from dualdecoder.selection_replay import ReplayConfig, replay_selection
from dualdecoder.shapes import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("name", ["quest", "oasiskv"])]
OPTIONS = {"quest": {"budget": 96}, "oasiskv": {"budget": 96, "fetch_ratio": 0.4}}
STEPS = 40


def sharp_tiny(name: str, device: str, dtype: str = "float32") -> Engine:
    model = sharpened(load_model("random:tiny")).to(device, dtype_from_name(dtype))
    return Engine(model, None, name, method_config(name, OPTIONS[name]))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    # With seed 0 two of Quest's scores at a cut are equal to fp32's rounding, and the CPU and the GPU part there.
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in (400, 333, 7)]


def decoded(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor], dict[str, float]]:
    """Tokens and logits of every step, and the method's counters."""
    run = engine.start(prompts, STEPS)
    steps = [(step.token_B, step.logits_BV.cpu()) for step in run.steps]
    return [s[0] for s in steps], [s[1] for s in steps], run.method.statistics()


def test_tokens_and_logits_are_those_of_the_cpu(name: str, prompts: list[list[int]]) -> None:
    tokens, logits, statistics = decoded(sharp_tiny(name, "cpu"), prompts)
    got_tokens, got_logits, got_statistics = decoded(sharp_tiny(name, "cuda"), prompts)
    assert got_tokens == tokens
    assert max((a - b).abs().max() for a, b in zip(got_logits, logits, strict=True)) < 1e-3
    assert got_statistics == pytest.approx(statistics, rel=0.01)


def test_graph_is_bit_equal_to_eager(name: str, prompts: list[list[int]], monkeypatch) -> None:
    engine = sharp_tiny(name, "cuda")
    tokens, logits, statistics = decoded(engine, prompts)
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 10**9)
    eager_tokens, eager_logits, eager_statistics = decoded(engine, prompts)
    assert tokens == eager_tokens
    assert statistics == eager_statistics
    assert all(torch.equal(a, b) for a, b in zip(logits, eager_logits, strict=True))


def test_a_covering_budget_is_full_kv(name: str, prompts: list[list[int]]) -> None:
    covering = sharp_tiny(name, "cuda").with_method(name, budget=512)
    full = sharp_tiny(name, "cpu").with_method("full_kv")
    assert decoded(covering, prompts)[0] == decoded(full, prompts)[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_stay_finite(name: str, dtype: str, prompts: list[list[int]]) -> None:
    assert all(logits.isfinite().all() for logits in decoded(sharp_tiny(name, "cuda", dtype), prompts)[1])


def test_plan_equals_what_is_allocated(name: str) -> None:
    made, config = method_class(name), method_config(name, OPTIONS[name])
    sizes = {"batch": 3, "context": 1000, "dtype": torch.bfloat16}
    before = torch.cuda.memory_allocated()
    method = made(SHAPES["qwen3-8b"], config, **sizes, device="cuda")
    held = torch.cuda.memory_allocated() - before
    assert method.ledger.plan() == made.plan(SHAPES["qwen3-8b"], config, **sizes, device_type="cuda")
    # The allocator rounds each tensor up to 512 bytes.
    assert method.ledger.plan().gpu_total == pytest.approx(held, rel=0.02)


def test_synthetic_selection_is_captured(name: str) -> None:
    """A step with replaced selections, in a graph, at the head size of the paper's models."""
    config = method_config(name, {"budget": 272})
    sizes = {"batch": 2, "context": 4096, "dtype": torch.bfloat16}
    small = ModelConfig("four-layers", 4, 512, 1024, 32, 8, 128, 512, 8192)
    method = method_class(name)(small, config, **sizes, device="cuda")
    method.fill_synthetic(4000)
    replay_selection(method, ReplayConfig(reuse=0.5, accuracy=0.75))
    model = random_decoder(small, torch.bfloat16, "cuda")
    tokens_BR = torch.ones(2, method.rows, dtype=torch.int64, device="cuda")
    everyone_B = torch.ones(2, dtype=torch.bool, device="cuda")
    run = graphs.StepRunner(model, method)
    for _ in range(40):
        assert run(tokens_BR, method.length_B, everyone_B).isfinite().all()
    assert run.graph is not None
    assert method.chunks_B.tolist() == [4040 // 16] * 2
    if name == "oasiskv":
        assert method.statistics()["admitted"] == method.statistics()["prefetched_bytes"] / 8192
        assert 0 < method.statistics()["agreement"] < 1
