"""On the real model: prediction beats reuse, and the true seed beats random ones (paper Fig. 7; claims C6, C7)."""

import pytest

from dualdecoder.engine import Engine

STEPS = 48


@pytest.fixture(scope="module")
def snapshot(smollm2: Engine, manual):
    return smollm2.prefill(manual(4096))


def decode(smollm2: Engine, snapshot, speculation: str) -> tuple[dict[str, float], float]:
    run = smollm2.with_method("dualdecoder", budget=256, speculation=speculation).resume([snapshot], STEPS + 1)
    right = [step.speculated[0] for step in run.steps]
    return run.method.statistics(), sum(right) / len(right)


def test_prediction_beats_reuse_and_random_seeds(smollm2: Engine, snapshot) -> None:
    results = {name: decode(smollm2, snapshot, name) for name in ("self", "random_first", "random")}
    accuracy = {name: statistics["kv_accuracy"] for name, (statistics, _) in results.items()}
    reuse = results["self"][0]["reuse"]
    assert accuracy["self"] >= reuse + 0.10
    assert accuracy["self"] > accuracy["random_first"] > accuracy["random"]
    assert results["self"][1] > results["random"][1]
    # What the prediction found was in the buffer when it was needed.
    statistics = results["self"][0]
    assert statistics["hit_rate"] == pytest.approx(statistics["kv_accuracy"], abs=0.01)
