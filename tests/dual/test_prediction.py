"""On the real model: prediction beats reuse, and the true seed beats random ones (paper Fig. 7; claims C6, C7)."""

from dataclasses import dataclass

import pytest

from dualdecoder.engine import Engine

STEPS = 48
# One text says little: how well prediction does depends on how much the model repeats itself in it.
STARTS = (0, 20_000, 40_000)
CONTEXT = 2048
# A sixteenth of the context, as 256 of the 4,096 tokens of the recorded figures.
BUDGET = 128


@dataclass(frozen=True)
class Decoded:
    """Statistics of one decode of all texts, and the share of speculated tokens that were right."""

    kv_accuracy: float
    reuse: float
    hit_rate: float
    token_accuracy: float


@pytest.fixture(scope="module")
def decoded(smollm2: Engine, manual) -> dict[str, Decoded]:
    """By speculation; the texts are one batch, and each counts as much as the others."""
    ids = manual(STARTS[-1] + CONTEXT)
    snapshots = [smollm2.prefill(ids[start : start + CONTEXT]) for start in STARTS]
    return {name: decode(smollm2, snapshots, name) for name in ("self", "random_first", "random")}


def decode(smollm2: Engine, snapshots: list, speculation: str) -> Decoded:
    run = smollm2.with_method("dualdecoder", budget=BUDGET, speculation=speculation).resume(snapshots, STEPS + 1)
    right = [sequence for step in run.steps for sequence in step.speculated]
    assert len(right) == len(snapshots) * STEPS
    statistics = run.method.statistics()
    return Decoded(*(statistics[name] for name in ("kv_accuracy", "reuse", "hit_rate")), sum(right) / len(right))


def test_prediction_beats_reuse_and_random_seeds(decoded: dict[str, Decoded]) -> None:
    true = decoded["self"]
    assert true.kv_accuracy - true.reuse >= 0.10
    assert true.kv_accuracy > decoded["random_first"].kv_accuracy > decoded["random"].kv_accuracy
    assert true.token_accuracy > decoded["random"].token_accuracy
    # What the prediction found was in the buffer when it was needed.
    assert true.hit_rate == pytest.approx(true.kv_accuracy, abs=0.01)
