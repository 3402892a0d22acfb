"""SpeCache on a GPU: the CPU's tokens, a graph like eager steps, copies that overlap, memory as planned."""

import pytest
import torch
from support import sharpened

from baselines.specache import SpeCache
from dualdecoder import graphs
from dualdecoder.checkpoints import load_model
from dualdecoder.engine import Engine
from dualdecoder.graphs import WARMUP_STEPS, StepRunner
from dualdecoder.method import method_config

pytestmark = pytest.mark.gpu
OPTIONS = {"group": 16, "top": 24}
STEPS = 40


def sharp_tiny(device: str, dtype: torch.dtype = torch.float32, **options: int) -> Engine:
    model = sharpened(load_model("random:tiny"))
    return Engine(model.to(device, dtype), None, "specache", method_config("specache", {**OPTIONS, **options}))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in (400, 333, 17)]


def decoded(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor, dict[str, float]]:
    """Tokens and logits of all steps, and the counters."""
    run = engine.start(prompts, STEPS)
    steps = [(step.token_B, step.logits_BV.cpu()) for step in run.steps]
    return [tokens for tokens, _ in steps], torch.stack([logits for _, logits in steps]), run.method.statistics()


@pytest.mark.parametrize("bits", [1, 2])
def test_tokens_and_logits_are_those_of_the_cpu(prompts: list[list[int]], bits: int) -> None:
    tokens, logits, counts = decoded(sharp_tiny("cpu", bits=bits), prompts)
    got_tokens, got_logits, got_counts = decoded(sharp_tiny("cuda", bits=bits), prompts)
    assert got_tokens == tokens
    # A token at the cut of the choice may fall either way; then one row of logits moves by a token's low bits.
    same = (got_logits - logits).abs().amax(dim=-1) < 1e-3
    assert same.float().mean() > 0.9
    assert got_counts == pytest.approx(counts, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_is_bit_equal_to_eager(prompts: list[list[int]], dtype: torch.dtype, monkeypatch) -> None:
    got = decoded(sharp_tiny("cuda", dtype), prompts)
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 10**9)
    expected = decoded(sharp_tiny("cuda", dtype), prompts)
    assert got[0] == expected[0] and got[2] == expected[2]
    assert torch.equal(got[1], expected[1])
    assert got[2]["prefetched_bytes"] > 0 and got[2]["reused"] > 0


def test_ragged_sequences_are_what_they_are_alone(prompts: list[list[int]]) -> None:
    engine = sharp_tiny("cuda")
    for prompt, together in zip(prompts, engine.generate(prompts, STEPS), strict=True):
        assert together.token_ids == engine.generate([prompt], STEPS)[0].token_ids


def test_real_model_gives_the_tokens_of_the_cpu(smollm2: Engine, manual) -> None:
    prompts = [manual(1500), manual(700)]
    expected = smollm2.with_method("specache").generate(prompts, max_new_tokens=48)
    model = smollm2.model.to("cuda", torch.float32)
    got = Engine(model, smollm2.tokenizer, "specache", method_config("specache", {})).generate(prompts, 48)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_plan_equals_what_is_allocated() -> None:
    engine = sharp_tiny("cuda")
    sizes = {"batch": 3, "context": 4000, "dtype": torch.float32}
    before = torch.cuda.memory_allocated()
    method = SpeCache(engine.model.config, engine.config, **sizes, device="cuda")
    held = torch.cuda.memory_allocated() - before
    assert method.ledger.plan() == SpeCache.plan(engine.model.config, engine.config, **sizes, device_type="cuda")
    # The allocator rounds each tensor up to 512 bytes.
    assert method.ledger.plan().gpu_total == pytest.approx(held, rel=0.03)


def test_copies_overlap_the_rest_of_the_step() -> None:
    """From a graph: a step with its copies takes less than the same step without them plus the copies alone."""
    model = load_model("random:llama-3.1-8b", torch.bfloat16, "cuda")
    config = method_config("specache", {"top": 128, "host_sequences": 1})
    method = SpeCache(model.config, config, batch=8, context=2048, dtype=torch.bfloat16, device="cuda")
    method.fill_synthetic(1900)
    copies_ms = _milliseconds(lambda: _copy_everything(method))
    step_ms = {}
    for method.transfers in (False, True):
        for layer in method.layers:
            layer.pairs.held_BKS.fill_(-1)
        step_ms[method.transfers] = _milliseconds(_step(model, method))
    assert method.statistics()["prefetched_bytes"] > 0
    assert step_ms[True] < step_ms[False] + 0.5 * copies_ms


def _step(model, method: SpeCache):
    run = StepRunner(model, method)
    tokens_BR = torch.randint(model.config.vocabulary, (method.batch, 2), device="cuda")
    everyone_B = torch.ones(method.batch, dtype=torch.bool, device="cuda")

    def step() -> None:
        # Nothing is in the buffers: every chosen token is copied in every step.
        for layer in method.layers:
            layer.pairs.held_BKS.fill_(-1)
        run(tokens_BR, method.length_B, everyone_B)

    for _ in range(WARMUP_STEPS + 1):
        step()
    return step


def _copy_everything(method: SpeCache) -> None:
    from dualdecoder.kernels.gather import gather_records

    for layer, (state, fetch) in enumerate(zip(method.layers, method.ops.fetches, strict=True)):
        heads, top = state.chosen_BKS.shape[0] * state.chosen_BKS.shape[1], state.chosen_BKS.shape[2]
        place = torch.arange(heads * top, dtype=torch.int32, device="cuda")
        fetch.entries.copy_(torch.stack((place // top, place % top, place % top)))
        fetch.count.fill_(heads * top)
        gather_records(method.host.records[layer], state.pairs.records_BKSXCD, fetch, rows=16)


def _milliseconds(work) -> float:
    """Median of some runs, by CUDA events."""
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[3]
