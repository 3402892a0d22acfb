"""The engine on a GPU: the CPU's tokens, and the invariant bit by bit, eager and from a graph."""

import pytest
import torch
from support import ForcedPredictor, Trace, assert_bit_equal, sharpened, start, trace

from dualdecoder import graphs
from dualdecoder.checkpoints import load_model
from dualdecoder.dual import DualDecoder
from dualdecoder.engine import Engine, Run
from dualdecoder.method import method_config

pytestmark = pytest.mark.gpu
OPTIONS = {"budget": 64, "window": 48}
STEPS = 40


def sharp_tiny(device: str, dtype: torch.dtype = torch.float32) -> Engine:
    model = sharpened(load_model("random:tiny"))
    return Engine(model.to(device, dtype), None, "dualdecoder", method_config("dualdecoder", OPTIONS))


@pytest.fixture(scope="module")
def gpu() -> Engine:
    return sharp_tiny("cuda")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in (400, 333, 257)]


@pytest.fixture(scope="module")
def truth(gpu: Engine, prompts: list[list[int]]) -> Trace:
    """No prefetch, eager: what every other way of running must give bit by bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "WARMUP_STEPS", 10**9)
        return trace(start(gpu, prompts, STEPS, schedule="on_demand", **OPTIONS))


def logits_and_tokens(run: Run) -> Trace:
    """Without a look at the selections, so that steps can be replayed from a graph."""
    result = Trace()
    for step in run.steps:
        result.logits.append(step.logits_BV)
        result.tokens.append(step.token_B)
    return result


def test_tokens_and_logits_are_those_of_the_cpu(gpu: Engine, prompts: list[list[int]]) -> None:
    expected = trace(start(sharp_tiny("cpu"), prompts, STEPS, **OPTIONS))
    got = logits_and_tokens(start(gpu, prompts, STEPS, **OPTIONS))
    assert got.tokens == expected.tokens
    assert max((a.cpu() - b).abs().max() for a, b in zip(got.logits, expected.logits, strict=True)) < 1e-3


@pytest.mark.parametrize("urgent", ["gather", "in_place"])
@pytest.mark.parametrize("schedule", ["layer_aware", "on_demand"])
@pytest.mark.parametrize("speculation", ["self", "random_first", "random"])
def test_graph_is_bit_equal_to_eager(gpu, prompts, truth: Trace, schedule: str, speculation: str, urgent: str) -> None:
    run = start(gpu, prompts, STEPS, schedule=schedule, speculation=speculation, urgent=urgent, **OPTIONS)
    assert_bit_equal(logits_and_tokens(run), truth)
    statistics = run.method.statistics()
    assert statistics["hit"] + statistics["urgent"] == statistics["selected"] > 0


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
def test_forced_predictions_change_nothing(gpu, prompts, truth: Trace, quality: float, monkeypatch) -> None:
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 10**9)
    run = start(gpu, prompts, STEPS, **OPTIONS)
    forced = ForcedPredictor(truth, run.method, quality)
    run.method.rewrite = lambda layer, chosen, own: (chosen, forced.predict(layer).cuda())
    assert_bit_equal(trace(run), truth)
    assert run.method.statistics()["kv_accuracy"] == pytest.approx(quality, abs=0.01)


def test_bf16_is_within_its_rounding(prompts: list[list[int]]) -> None:
    """bf16 keeps 8 bits: logits of the same tokens differ from fp32 by a few hundredths of their spread."""
    exact, rounded = sharp_tiny("cuda"), sharp_tiny("cuda", torch.bfloat16)
    reference = exact.prefill(prompts[0]).logits_V.float()
    got = rounded.prefill(prompts[0]).logits_V.float()
    assert (got - reference).norm() / reference.norm() < 0.1
    run = start(rounded, prompts, STEPS, **OPTIONS)
    assert all(logits.isfinite().all() for logits in logits_and_tokens(run).logits)


def test_plan_equals_what_is_allocated_on_the_gpu(gpu: Engine) -> None:
    sizes = {"batch": 3, "context": 1000, "dtype": torch.float32}
    before = torch.cuda.memory_allocated()
    method = DualDecoder(gpu.model.config, gpu.config, **sizes, device="cuda")
    held = torch.cuda.memory_allocated() - before
    assert method.ledger.plan() == DualDecoder.plan(gpu.model.config, gpu.config, **sizes, device_type="cuda")
    # The allocator rounds each tensor up to 512 bytes.
    assert method.ledger.plan().gpu_total == pytest.approx(held, rel=0.02)


@pytest.mark.slow
def test_two_thousand_steps_do_not_grow_or_drift(gpu: Engine, prompts: list[list[int]], monkeypatch) -> None:
    """No growth of memory; the graph's tokens are the eager steps' to the last."""
    run, used, tokens = start(gpu, prompts, 2001, **OPTIONS), [], []
    for number, step in enumerate(run.steps):
        tokens.append(step.token_B)
        if number % 500 == 100:
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert len(used) == 4
    assert len(set(used)) == 1
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 10**9)
    eager = [step.token_B for step in start(gpu, prompts, 2001, **OPTIONS).steps]
    assert len(tokens) == 2000 and tokens == eager
