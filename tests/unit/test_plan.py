"""plan() against the bytes that are really there, and against arithmetic done by hand."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dualdecoder.config import DualDecoderConfig, ModelConfig, RopeConfig
from dualdecoder.method import REGISTRY, method_class, method_config
from dualdecoder.model import planned_weight_bytes, random_decoder
from dualdecoder.planning import plan_memory
from dualdecoder.shapes import SHAPES

GIB = 2**30
ODD = ModelConfig("odd", 3, 24, 40, 6, 2, 10, 50, 4096, RopeConfig())


def held_bytes(value: object, seen: dict[int, int]) -> dict[int, int]:
    """Bytes of every tensor storage reachable from an object, by address."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, list | tuple):
        for item in value:
            held_bytes(item, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():
            held_bytes(item, seen)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (3, 77), (2, 1025)])
@pytest.mark.parametrize("name", REGISTRY)
def test_plan_equals_what_is_allocated(name: str, batch: int, context: int, dtype: torch.dtype) -> None:
    config = method_config(name, {})
    arguments = {"batch": batch, "context": context, "dtype": dtype}
    plan = method_class(name).plan(ODD, config, **arguments)
    method = method_class(name)(ODD, config, **arguments)
    held = held_bytes(method, {})
    assert sum(held.values()) == plan.gpu_total + plan.host_total
    host = held_bytes(method.host, {}) if hasattr(method, "host") else {}
    assert sum(host.values()) == plan.host_total


@pytest.mark.parametrize("name", REGISTRY)
def test_planning_takes_no_memory(name: str) -> None:
    """What a method keeps of 16 TB of KV would not fit: 10 TB and more, or 0.3 TB at 2,464 tokens a sequence."""
    chosen = method_class(name)
    plan = chosen.plan(SHAPES["llama-3-8b"], method_config(name, {}), 1000, 131072, torch.bfloat16)
    assert plan.gpu_total + plan.host_total > (10e12 if chosen.capabilities.recalls else 0.3e12)


def test_llama_8b_at_128k_batch_12() -> None:
    """The paper's memory figure: 30 GB. Landmarks and weights by hand, everything together at most 31 GB."""
    plan = plan_memory(SHAPES["llama-3-8b"], "dualdecoder", DualDecoderConfig(), 12, 131072, torch.bfloat16)
    assert plan.gpu["landmarks"] == 12 * 131072 // 8 * 8 * 128 * 2 * 32 == 12 * GIB
    weights = 2 * (2 * 128256 * 4096 + 4096 + 32 * (2 * 4096 + 4096 * (6144 + 4096 + 3 * 14336)))
    assert plan.gpu["weights"] == weights
    assert round(weights / GIB) == 15
    assert plan.gpu["buffers"] == 2 * 12 * 8 * 256 * (4096 + 8)
    assert plan.gpu["outliers"] == 32 * 12 * 8 * 48 * 4096
    assert plan.gpu["window"] == 32 * 12 * 64 * 4096
    assert plan.gpu_total <= 31e9
    assert plan.host["kv"] == 12 * 16 * GIB


def test_full_kv_is_131072_bytes_a_token() -> None:
    plan = plan_memory(SHAPES["llama-3-8b"], "full_kv", method_config("full_kv", {}), 4, 1000, torch.bfloat16)
    assert plan.gpu["kv"] == 4 * 1000 * 131072


def test_landmarks_grow_with_context() -> None:
    """From 64K to 512K: 8,192 bytes a token (claim C5: + 3.7 GB), and a little workspace for their scores."""
    short, long = (
        plan_memory(SHAPES["llama-3-8b"], "dualdecoder", DualDecoderConfig(), 1, context, torch.bfloat16)
        for context in (65536, 524288)
    )
    grown = {name: long.gpu[name] - size for name, size in short.gpu.items() if long.gpu[name] != size}
    assert set(grown) <= {"landmarks", "workspace"}
    assert grown["landmarks"] == 458752 * 8192
    assert grown.get("workspace", 0) < 0.01 * grown["landmarks"]


def test_weights_of_named_shapes_have_the_published_parameter_counts() -> None:
    """Billions of parameters as on the models' pages."""
    published = {"llama-3.1-8b": 8.03, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen3-8b": 8.19}
    for name, billions in published.items():
        plan = plan_memory(SHAPES[name], "full_kv", method_config("full_kv", {}), 1, 8, torch.bfloat16)
        assert plan.gpu["weights"] / 2e9 == pytest.approx(billions, rel=5e-3)


def test_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DualDecoderConfig().budget = 1


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True}])
def test_planned_weights_are_those_of_the_decoder(changes: dict[str, bool]) -> None:
    shape = dataclasses.replace(ODD, **changes)
    assert planned_weight_bytes(shape, torch.bfloat16) == random_decoder(shape, torch.bfloat16).weight_bytes()


def test_planning_weights_of_any_size_makes_no_tensor() -> None:
    shape = dataclasses.replace(ODD, layers=10**9, width=2**31, mlp_width=2**31)
    assert planned_weight_bytes(shape, torch.float32) > 10**9 * 2**62
