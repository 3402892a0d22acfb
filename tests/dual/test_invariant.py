"""Design section 4.4: prediction, buffers and schedule change time, never row 0's result."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ForcedPredictor, Trace, assert_bit_equal, start, trace

from dualdecoder.engine import Engine
from dualdecoder.landmarks import NO_CHUNK

OPTIONS = {"budget": 64, "window": 48}
STEPS = 24


@pytest.fixture(scope="module")
def prompts(random_ids_module) -> list[list[int]]:
    return [random_ids_module(400, 1), random_ids_module(333, 2), random_ids_module(257, 3)]


@pytest.fixture(scope="module")
def random_ids_module():
    return lambda n, seed: torch.randint(512, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def truth(tiny: Engine, prompts: list[list[int]]) -> Trace:
    """The same selection with no prefetch at all, also two rows."""
    return trace(start(tiny, prompts, STEPS, schedule="on_demand", **OPTIONS))


@pytest.mark.parametrize("speculation", ["self", "random_first", "random"])
@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
def test_forced_predictions_change_nothing(
    tiny: Engine, prompts: list[list[int]], truth: Trace, quality: float, speculation: str
) -> None:
    run = start(tiny, prompts, STEPS, speculation=speculation, **OPTIONS)
    run.method.rewrite = ForcedPredictor(truth, run.method, quality)
    assert_bit_equal(trace(run), truth)
    statistics = run.method.statistics()
    # The prediction was really as good as asked, and the buffer really held that much of the selection.
    assert statistics["kv_accuracy"] == pytest.approx(quality, abs=0.01)
    assert statistics["hit_rate"] == pytest.approx(quality, abs=0.01)
    assert statistics["hit"] + statistics["urgent"] == statistics["selected"]


@pytest.mark.parametrize("speculation", ["self", "random_first", "random"])
def test_own_predictions_change_nothing(tiny: Engine, prompts: list[list[int]], truth: Trace, speculation: str) -> None:
    assert_bit_equal(trace(start(tiny, prompts, STEPS, speculation=speculation, **OPTIONS)), truth)


@pytest.mark.parametrize("quality", [0.0, 0.5])
def test_reading_misses_in_place_changes_nothing(tiny, prompts, truth: Trace, quality: float) -> None:
    run = start(tiny, prompts, STEPS, urgent="in_place", **OPTIONS)
    run.method.rewrite = ForcedPredictor(truth, run.method, quality)
    assert_bit_equal(trace(run), truth)
    assert run.method.statistics()["urgent"] > 0


def test_one_row_equals_two_rows_to_rounding(tiny: Engine, prompts: list[list[int]], truth: Trace) -> None:
    got = trace(start(tiny, prompts, STEPS, speculation="none", **OPTIONS))
    assert got.tokens == truth.tokens
    assert max((a - b).abs().max() for a, b in zip(got.logits, truth.logits, strict=True)) < 1e-4


@settings(max_examples=12)
@given(seed=st.integers(0, 2**16), layers=st.integers(2, 5), skipped=st.floats(0, 1), quality=st.floats(0, 1))
def test_random_schedules(seed: int, layers: int, skipped: float, quality: float) -> None:
    """Odd and even layer counts; prefetches of any quality that are left out at random."""
    engine = random_engine(layers, seed)
    prompts = [torch.randint(64, (n,), generator=torch.Generator().manual_seed(seed)).tolist() for n in (130, 97)]
    options = {"budget": 32, "window": 48, "outliers_per_1024": 24}
    truth = trace(start(engine, prompts, 12, schedule="on_demand", **options))
    run = start(engine, prompts, 12, **options)
    forced = ForcedPredictor(truth, run.method, quality, seed)

    def lossy(layer: int, chosen_BKS: torch.Tensor, own_BKS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = forced.predict(layer)
        skip = forced.random.random() < skipped
        return chosen_BKS, torch.full_like(predicted, NO_CHUNK) if skip else predicted

    run.method.rewrite = lossy
    assert_bit_equal(trace(run), truth)


def random_engine(layers: int, seed: int) -> Engine:
    from dualdecoder.config import ModelConfig
    from dualdecoder.method import method_config
    from dualdecoder.model import random_decoder

    shape = ModelConfig("random", layers, 32, 48, 6, 2, 8, 64, 1024)
    return Engine(random_decoder(shape, seed=seed), None, "full_kv", method_config("full_kv", {}))


def test_unwritten_memory_is_never_read(tiny: Engine, prompts: list[list[int]], truth: Trace) -> None:
    """Garbage in everything that is allocated, before the prefill, must not show."""
    engine = tiny.with_method("dualdecoder", **OPTIONS)
    snapshots = [engine.prefill(prompt) for prompt in prompts]
    allocate = engine._allocate

    def poisoned(batch: int, context: int):
        method = allocate(batch, context)
        tensors = list(method.host.records)
        for state in method.layers:
            tensors += [state.window_BKXWD, state.landmarks_BKND, state.outlier_records_BKOXCD]
        for tensor in [*tensors, *(buffer.records_BKSXCD for buffer in method.buffers)]:
            tensor.uniform_(-1e3, 1e3)
        return method

    engine._allocate = poisoned
    assert_bit_equal(trace(engine.resume(snapshots, STEPS)), truth)
