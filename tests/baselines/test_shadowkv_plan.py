"""What ShadowKV takes and reads in bytes, a synthetic state, and settings that are refused."""

import pytest
import torch

from baselines.shadowkv import ShadowKV, ShadowKVConfig
from dualdecoder.config import ModelConfig
from dualdecoder.errors import ConfigError
from dualdecoder.model import random_decoder
from dualdecoder.selection_replay import ReplayConfig, replay_selection
from dualdecoder.shapes import SHAPES
from dualdecoder.step import decode_step

SHAPE = ModelConfig("two-layers", 2, 8, 8, 6, 2, 16, 16, 4096)
CHUNK = 8


def test_bytes_a_prompt_token_at_llama_3_8b() -> None:
    """18,432: left factors and landmarks; 18,688 with the landmark numbers that the public code stores as int64."""
    shape, config = SHAPES["llama-3-8b"], ShadowKVConfig()
    short, long = (
        ShadowKV.plan(shape, config, batch=1, context=context, dtype=torch.bfloat16, device_type="cuda")
        for context in (65536, 131072)
    )
    grown = {name: (long.gpu[name] - size) / 65536 for name, size in short.gpu.items() if long.gpu[name] != size}
    factors, landmarks = 160 * 2 * 32, 8 * 128 * 2 * 32 // CHUNK
    assert (grown.pop("left_factors"), grown.pop("landmarks")) == (factors, landmarks) == (10_240, 8_192)
    assert factors + landmarks == 18_432
    assert factors + landmarks + 8 * 8 * 32 // CHUNK == 18_688
    assert grown.pop("rotation") == 128 * 2, "a position, for the whole batch"
    assert set(grown) == {"workspace"}
    assert grown["workspace"] < 0.01 * 18_432
    assert (long.host["kv"] - short.host["kv"]) / 65536 == 65_536, "values only"
    # Fixed, a sequence: K and V of 256 chunks and 48 outliers, right factors, room for generated tokens.
    assert long.gpu["buffers"] == 32 * 8 * 256 * (4096 + 8)
    assert long.gpu["outliers"] == 32 * 8 * 48 * 4096
    assert long.gpu["right_factors"] == 32 * 8 * 160 * 128 * 2
    assert long.gpu["window"] == (32 + 8 + 1024) * 131_072


def test_batch_22_at_128k_fits_80_gb() -> None:
    config = ShadowKVConfig(generated=256)
    plan = ShadowKV.plan(SHAPES["llama-3.1-8b"], config, 22, 131072, torch.bfloat16, device_type="cuda")
    assert plan.gpu_total + 16.1e9 < 80e9


def test_rank_is_capped_and_outliers_are_never_none() -> None:
    method = ShadowKV(SHAPE, ShadowKVConfig(budget=8), batch=1, context=400, dtype=torch.float32)
    assert method.keys[0].rank == 32
    assert method.layers[0].outliers_BKO.shape[-1] == 1
    assert ShadowKVConfig(budget=1024).outliers == 24
    assert ShadowKVConfig().attended_tokens == 2048 + 48 * 8 + 32 == 2464


@pytest.mark.parametrize(
    ("device_type", "batch", "parts", "expected"),
    [("cuda", 7, 0, [7]), ("cuda", 9, 0, [4, 5]), ("cpu", 9, 0, [9]), ("cuda", 9, 1, [9]), ("cuda", 3, 99, [1, 1, 1])],
)
def test_a_large_batch_on_a_gpu_takes_turns(device_type: str, batch: int, parts: int, expected: list[int]) -> None:
    config = ShadowKVConfig(budget=64, parts=parts)
    sizes = {"batch": batch, "context": 900, "dtype": torch.float32}
    method = ShadowKV(SHAPE, config, **sizes, device="meta", planned_for=device_type)
    assert [len(range(batch)[part]) for part in method.micro_batches] == expected


@pytest.mark.parametrize("parts", [1, 2])
def test_synthetic_state_with_a_replayed_selection(parts: int) -> None:
    shape, config = SHAPES["tiny"], ShadowKVConfig(budget=64, host_sequences=1, parts=parts, generated=64)
    method = ShadowKV(shape, config, batch=3, context=1100, dtype=torch.float32)
    method.fill_synthetic(1000)
    assert method.read_bytes() == by_hand(1.0)
    replay_selection(method, ReplayConfig(reuse=0.5))
    model, everyone = random_decoder(shape), torch.ones(3, dtype=torch.bool)
    for _ in range(5):
        tokens_B1 = torch.ones(3, 1, dtype=torch.int64)
        assert decode_step(model, method, tokens_B1, method.length_B.clone(), everyone).isfinite().all()
    statistics = method.statistics()
    assert statistics["reuse"] == 0.5
    assert statistics["hit_rate"] == 0.4, "nothing to reuse in the first of five steps"
    assert method.read_bytes() == by_hand(0.6, generated=5)
    assert len(method.host.records[0]) == 1


def by_hand(misses: float, generated: int = 0) -> int:
    """``read_bytes`` of the tiny model: 4 layers, 2 KV heads of 16, fp32, 3 sequences of 1000 tokens, budget 64."""
    chunks, outliers, selected = 121, 2, 8
    left_rows = 32 * 4 * misses * selected * CHUNK * 2
    tokens = (outliers + selected) * CHUNK + 1000 - chunks * CHUNK + generated
    a_sequence = chunks * 2 * 16 * 4 + left_rows + tokens * 2 * 2 * 16 * 4 + 2 * 32 * 16 * 4
    return round(4 * 3 * a_sequence)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"generated": 0}, "generated=0"),
        ({"parts": -1}, "parts=-1"),
        ({"budget": 2047}, "budget=2047"),
        ({"budget": "2048"}, "budget='2048'"),
        ({"local": 0}, "local=0"),
    ],
)
def test_bad_settings_are_named(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShadowKVConfig(**options)


def test_two_rows_are_refused() -> None:
    method = ShadowKV(SHAPE, ShadowKVConfig(), batch=1, context=64, dtype=torch.float32)
    with pytest.raises(ConfigError, match="rows=2"):
        method.begin_step(2, torch.tensor([True]))
