"""ShadowKV on a GPU: the CPU's tokens; the same bits eager, from a graph and without reuse; the bytes it planned."""

import pytest
import torch
from support import Trace, assert_bit_equal, sharpened

from baselines.low_rank import factorise
from baselines.shadowkv import ShadowKV, ShadowKVConfig
from dualdecoder import graphs
from dualdecoder.checkpoints import load_model
from dualdecoder.engine import Engine, Run
from dualdecoder.method import method_config
from dualdecoder.model import random_decoder
from dualdecoder.selection_replay import ReplayConfig, replay_selection
from dualdecoder.shapes import SHAPES

pytestmark = pytest.mark.gpu
OPTIONS = {"budget": 64, "rank": 16, "generated": 64}
STEPS = 40


def sharp_tiny(device: str, dtype: torch.dtype = torch.float32, **options: int) -> Engine:
    model = sharpened(load_model("random:tiny"))
    return Engine(model.to(device, dtype), None, "shadowkv", method_config("shadowkv", {**OPTIONS, **options}))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in (400, 333, 257, 20, 181)]


def logits_and_tokens(run: Run) -> Trace:
    result = Trace()
    for step in run.steps:
        result.logits.append(step.logits_BV)
        result.tokens.append(step.token_B)
    return result


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_tokens_and_logits_are_those_of_the_cpu(prompts: list[list[int]], parts: int) -> None:
    cpu, gpu = (sharp_tiny(device, parts=parts).start(prompts, STEPS) for device in ("cpu", "cuda"))
    expected, got = logits_and_tokens(cpu), logits_and_tokens(gpu)
    assert got.tokens == expected.tokens
    assert max((a.cpu() - b).abs().max() for a, b in zip(got.logits, expected.logits, strict=True)) < 1e-3
    assert gpu.method.statistics()["selected"] == cpu.method.statistics()["selected"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_graph_and_reuse_change_no_bit(prompts, parts: int, dtype: torch.dtype, monkeypatch) -> None:
    engine = sharp_tiny("cuda", dtype, parts=parts)
    snapshots = [engine.prefill(prompt) for prompt in prompts]
    run = engine.resume(snapshots, STEPS)
    got = logits_and_tokens(run)
    assert run.method.statistics()["hit_rate"] > 0.2
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 10**9)
    forgetful = engine.resume(snapshots, STEPS)
    begin_step = forgetful.method.begin_step

    def forget(rows: int, commit_B: torch.Tensor) -> None:
        for buffer in forgetful.method.buffers:
            buffer.clear()
            buffer.records_BKSXCD.fill_(1e3)
        begin_step(rows, commit_B)

    forgetful.method.begin_step = forget
    assert_bit_equal(got, logits_and_tokens(forgetful))
    assert forgetful.method.statistics()["hit"] == 0


@pytest.mark.parametrize("tokens", [300, 4096])
def test_factors_in_fp32_are_as_good_as_the_truncated_svd(tokens: int) -> None:
    """1,024 columns with a steep spectrum: the reconstruction's error is the best there is, and so is its size."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.linalg.qr(torch.randn(1024, 1024, generator=generator, dtype=torch.float64)).Q
    keys = torch.randn(tokens, 1024, generator=generator, dtype=torch.float64) * torch.arange(1, 1025) ** -0.7 @ mixing
    left, right = factorise(keys.float().cuda(), 160)
    rebuilt = (left.double() @ right.double()).cpu()
    u, s, vt = torch.linalg.svd(keys, full_matrices=False)
    best = (u[:, :160] * s[:160]) @ vt[:160]
    assert (keys - rebuilt).norm() < (keys - best).norm() * (1 + 1e-5)
    assert (rebuilt - best).norm() / best.norm() < 1e-3


def test_plan_equals_what_is_allocated_on_the_gpu() -> None:
    shape, config = SHAPES["tiny"], ShadowKVConfig(**OPTIONS)
    sizes = {"batch": 5, "context": 1000, "dtype": torch.float32}
    before = torch.cuda.memory_allocated()
    method = ShadowKV(shape, config, **sizes, device="cuda")
    held = torch.cuda.memory_allocated() - before
    assert method.ledger.plan() == ShadowKV.plan(shape, config, **sizes, device_type="cuda")
    # The allocator rounds each tensor up to 512 bytes.
    assert method.ledger.plan().gpu_total == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("transfers", [True, False])
@pytest.mark.parametrize("parts", [1, 4])
def test_a_replayed_selection_from_a_graph_has_the_reuse_asked_for(parts: int, transfers: bool) -> None:
    shape = SHAPES["tiny"]
    config = ShadowKVConfig(budget=64, host_sequences=1, generated=64, parts=parts)
    method = ShadowKV(shape, config, batch=8, context=1100, dtype=torch.bfloat16, device="cuda")
    method.transfers = transfers
    method.fill_synthetic(1000)
    replay_selection(method, ReplayConfig(reuse=0.6))
    run = graphs.StepRunner(random_decoder(shape, torch.bfloat16, "cuda"), method)
    everyone_B = torch.ones(8, dtype=torch.bool, device="cuda")
    for _ in range(20):
        tokens_B1 = torch.ones(8, 1, dtype=torch.int64, device="cuda")
        assert run(tokens_B1, method.length_B, everyone_B).isfinite().all()
    assert run.graph is not None
    # round(0.4 * 8) of 8 chunks are new in every step.
    assert method.statistics()["reuse"] == 5 / 8


def test_the_real_models_greedy_tokens_equal_the_cpus(smollm2: Engine, manual) -> None:
    prompts, config = [manual(1500), manual(700)], method_config("shadowkv", {"budget": 256})
    on_gpu = Engine(smollm2.model.to("cuda", torch.float32), smollm2.tokenizer, "shadowkv", config)
    expected = smollm2.with_method("shadowkv", budget=256).generate(prompts, max_new_tokens=48)
    got = on_gpu.generate(prompts, max_new_tokens=48)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
