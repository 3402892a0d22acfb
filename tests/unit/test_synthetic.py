"""The synthetic selection has the reuse and accuracy it is asked for, and never repeats a chunk."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualdecoder.config import DualDecoderConfig
from dualdecoder.dual import DualDecoder
from dualdecoder.errors import ConfigError
from dualdecoder.ledger import Ledger
from dualdecoder.model import random_decoder
from dualdecoder.selection_replay import ReplayConfig, SelectionReplay, replay_selection
from dualdecoder.shapes import SHAPES
from dualdecoder.step import decode_step


@settings(max_examples=20)
@given(reuse=st.floats(0, 1), accuracy=st.floats(0, 1), seed=st.integers(0, 99), layer=st.integers(0, 3))
def test_shares_are_as_asked(reuse: float, accuracy: float, seed: int, layer: int) -> None:
    slots, chunks = 16, 101
    replay = SelectionReplay(ReplayConfig(reuse, accuracy, seed), (2, 3, chunks), slots, Ledger("cpu"))
    steps = []
    for _ in range(9):
        steps.append([replay.sets(i, 4) for i in range(4)][layer])
    for (chosen, predicted), (following, _) in pairwise(steps):
        for b in range(2):
            for k in range(3):
                now, guess, then = (set(t[b, k].tolist()) for t in (chosen, predicted, following))
                assert len(now) == len(guess) == slots
                assert all(0 <= chunk < chunks for chunk in now | guess)
                assert len(now & then) == slots - round((1 - reuse) * slots)
                assert len(guess & then) == round(accuracy * slots)


def test_bad_shares_and_short_contexts() -> None:
    with pytest.raises(ConfigError, match=r"accuracy=1\.5"):
        ReplayConfig(accuracy=1.5)
    with pytest.raises(ConfigError, match="context"):
        SelectionReplay(ReplayConfig(), (1, 1, 63), 16, Ledger("cpu"))


def test_replayed_steps_are_counted_as_asked() -> None:
    shape, config = SHAPES["tiny"], DualDecoderConfig(budget=64, host_sequences=1)
    method = DualDecoder(shape, config, batch=3, context=1100, dtype=torch.float32)
    method.fill_synthetic(1000)
    replay_selection(method, ReplayConfig(reuse=0.5, accuracy=0.75))
    model, everyone = random_decoder(shape), torch.ones(3, dtype=torch.bool)
    for _ in range(6):
        tokens_BR = torch.ones(3, 2, dtype=torch.int64)
        assert decode_step(model, method, tokens_BR, method.length_B.clone(), everyone).isfinite().all()
    statistics = method.statistics()
    assert statistics["kv_accuracy"] == 0.75
    assert statistics["reuse"] == 0.5
    assert len(method.host.records[0]) == 1
