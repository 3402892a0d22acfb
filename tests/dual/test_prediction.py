"""On the real model: prediction beats reuse, and the true seed beats random ones (paper Fig. 7; claims C6, C7)."""

from statistics import fmean

import pytest

from dualdecoder.engine import Engine

STEPS = 48


# One text says little: how well prediction does depends on how much the model repeats itself in it.
STARTS = (0, 20_000, 40_000)


@pytest.fixture(scope="module")
def snapshots(smollm2: Engine, manual):
    """Prefills of 4,096 tokens from several places of the manual."""
    ids = manual(STARTS[-1] + 4096)
    return [smollm2.prefill(ids[start : start + 4096]) for start in STARTS]


def decode(smollm2: Engine, snapshot, speculation: str) -> tuple[dict[str, float], float]:
    run = smollm2.with_method("dualdecoder", budget=256, speculation=speculation).resume([snapshot], STEPS + 1)
    right = [step.speculated[0] for step in run.steps]
    return run.method.statistics(), sum(right) / len(right)


def test_prediction_beats_reuse_and_random_seeds(smollm2: Engine, snapshots) -> None:
    runs = [decode(smollm2, snapshot, "self") for snapshot in snapshots]
    assert fmean(run["kv_accuracy"] - run["reuse"] for run, _ in runs) >= 0.10
    results = {name: decode(smollm2, snapshots[0], name) for name in ("random_first", "random")} | {"self": runs[0]}
    accuracy = {name: statistics["kv_accuracy"] for name, (statistics, _) in results.items()}
    assert accuracy["self"] > accuracy["random_first"] > accuracy["random"]
    assert results["self"][1] > results["random"][1]
    # What the prediction found was in the buffer when it was needed.
    statistics = results["self"][0]
    assert statistics["hit_rate"] == pytest.approx(statistics["kv_accuracy"], abs=0.01)
