"""GGUF files: read as llama.cpp and transformers read them, or refused by name with nothing left in the cache."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, dequantize
from small_checkpoints import (
    ROPES,
    assert_same,
    gguf_tensors,
    reference_logits,
    small_model,
    write_gguf,
)
from transformers import AutoModelForCausalLM

from dualdecoder.checkpoints import load_model, resolve, weights_id
from dualdecoder.errors import CheckpointError, UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("DUALDECODER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(("family", "kind"), [("llama", "Q8_0"), ("qwen2", "F32")])
def test_as_transformers_own_loader(file: Path, family: str, kind: str) -> None:
    write_gguf(file, small_model(family), GGMLQuantizationType[kind])
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    assert_same(file, reference_logits(theirs))


def test_the_converted_folder_is_right_for_transformers_too(file: Path) -> None:
    model = small_model(rope_parameters=dict(ROPES["llama3"]))
    write_gguf(file, model)
    theirs = AutoModelForCausalLM.from_pretrained(resolve(str(file)), dtype=torch.float32).eval()
    assert (reference_logits(theirs) - reference_logits(model)).abs().max() < 1e-3


def k_quants(rows: int, kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    """Random blocks with small scales; the last two bytes of a Q6_K block, the first four of Q4_K, are its scales."""
    size = {"Q6_K": 210, "Q4_K": 144}[kind.name]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16([5e-5]).tobytes(), np.uint8)
    where = [slice(208, 210)] if kind.name == "Q6_K" else [slice(0, 2), slice(2, 4)]
    for part in where:
        blocks[:, part] = scale
    return blocks


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K"])
def test_k_quants(file: Path, kind: str) -> None:
    quantised = GGMLQuantizationType[kind]
    model = small_model(hidden_size=256, intermediate_size=256)
    given, weights = {}, dict(model.named_parameters())
    for number, name in enumerate(("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj")):
        raw = k_quants(256, quantised, number)
        weights[f"model.layers.1.{name}.weight"].data = torch.from_numpy(dequantize(raw, quantised).copy())
        given[{"mlp.down_proj": "ffn_down", "mlp.up_proj": "ffn_up"}.get(name, "attn_output")] = (raw, quantised)
    write_gguf(file, model, tensors={f"blk.1.{name}.weight": value for name, value in given.items()})
    assert_same(file, reference_logits(model))


def write_split(folder: Path, model: Any, parts: int = 2, **keys: Any) -> Path:
    """One layer a file, as llama.cpp's gguf-split names them; returns the first."""
    names = list(gguf_tensors(model, "llama"))
    for part in range(parts):
        own = {"split.no": part, "split.count": parts, "split.tensors.count": len(names)} | keys
        here = [name for name in names if part == min(int(name.split(".")[1]) if "blk" in name else 0, parts - 1)]
        dropped = {name: None for name in names if name not in here}
        path = folder / f"m-{part + 1:05}-of-{parts:05}.gguf"
        write_gguf(path, model, tensors=dropped, own_keys=own)
    return folder / f"m-00001-of-{parts:05}.gguf"


def test_a_whole_split_is_read(tmp_path: Path) -> None:
    model = small_model()
    first = write_split(tmp_path, model)
    assert_same(first, reference_logits(model))


def test_every_part_of_a_split_is_in_the_identity(tmp_path: Path) -> None:
    first = write_split(tmp_path, small_model())
    before, logits = weights_id(str(first)), reference_logits(small_model())
    assert_same(first, logits)
    other = small_model(seed=1)
    second = first.with_name("m-00002-of-00002.gguf")
    (tmp_path / "other").mkdir()
    write_split(tmp_path / "other", other)
    shutil.copy(tmp_path / "other" / second.name, second)
    assert weights_id(str(first)) != before
    mixed = small_model()
    mixed.model.layers[1] = other.model.layers[1]
    assert_same(first, reference_logits(mixed))


def test_splits_that_are_not_whole(tmp_path: Path, cache: Path) -> None:
    first = write_split(tmp_path, small_model())
    second = first.with_name("m-00002-of-00002.gguf")
    alone = tmp_path / "alone.gguf"
    shutil.copy(first, alone)
    cases = [(second, "part 2 of 2"), (alone, "part 0 of 1 by its name is part 0 of 2")]
    shutil.copy(first, tmp_path / "n-00001-of-00002.gguf")
    cases.append((tmp_path / "n-00001-of-00002.gguf", "missing: n-00002-of-00002.gguf"))
    for path, said in cases:
        with pytest.raises(CheckpointError, match=said):
            load_model(str(path))
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match="part 1 of 2 by its name is part 0 of 2"):
        load_model(str(first))
    assert not list(cache.glob("*-v*"))


def test_split_of_three_with_a_wrong_count(tmp_path: Path) -> None:
    model = small_model(num_hidden_layers=3)
    assert_same(write_split(tmp_path, model, 3), reference_logits(model))
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count=99"):
        load_model(str(write_split(tmp_path, model, 3, **{"split.tensors.count": 99})))


NEUTRAL: dict[str, dict[str, Any]] = {
    "rope.scaling.type none": {"rope.scaling.type": "none", "rope.scaling.factor": 8.0},
    "no experts": {"expert_count": 0, "expert_used_count": 0},
    "usual scale": {"attention.scale": 0.25, "logit_scale": 1.0},
    "finetuned": {"rope.scaling.finetuned": True, "tensor_data_layout": "Meta AI original pth"},
    "no key length": {"attention.key_length": None, "attention.value_length": None, "rope.dimension_count": None},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_metadata_that_changes_nothing(file: Path, name: str) -> None:
    model = small_model()
    write_gguf(file, model, keys=NEUTRAL[name], own_keys={"general.name": "x", "quantize.imatrix.file": "y"})
    assert_same(file, reference_logits(model))


def test_metadata_that_transformers_drops(file: Path) -> None:
    yarn = ROPES["yarn"] | {"beta_fast": 8.0, "beta_slow": 2.0}
    model = small_model("qwen3", rope_parameters=yarn, rms_norm_eps=1e-2)
    keys = {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}
    write_gguf(file, model, keys=keys)
    assert_same(file, reference_logits(model))
    assert load_model(str(file)).config.max_context == 512  # 128 times 4


def test_a_factor_without_a_type_is_linear(file: Path) -> None:
    model = small_model(rope_parameters=dict(ROPES["linear"]))
    write_gguf(file, model, keys={"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scale_linear": 2.0})
    assert_same(file, reference_logits(model))


def test_a_window_limits_the_context(file: Path) -> None:
    for family in ("llama", "qwen2"):
        write_gguf(file, small_model(family), keys={"attention.sliding_window": 48})
        assert load_model(str(file)).config.max_context == 48


BIAS = np.zeros(64, np.float32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing layer weight": (
        {"tensors": {"blk.1.ffn_up.weight": None}},
        r"layers\.1\.mlp\.up_proj\.weight' is missing",
    ),
    "missing norm": ({"tensors": {"output_norm.weight": None}}, r"'model\.norm\.weight' is missing"),
    "missing table": ({"tensors": {"token_embd.weight": None}}, r"'token_embd\.weight' is missing"),
    "bias of a llama": ({"tensors": {"blk.0.attn_q.bias": BIAS}}, r"q_proj\.bias' is not one that this"),
    "unknown tensor": ({"tensors": {"blk.0.attn_sinks.weight": BIAS}}, r"attn_sinks\.weight' is not one that we read"),
    "long factors": ({"tensors": {"rope_factors_long.weight": BIAS}}, "rope_factors_long"),
    "misshapen": ({"tensors": {"output_norm.weight": BIAS[:32]}}, r"shape \(32,\), needs \(64,\)"),
    "integers": ({"tensors": {"output_norm.weight": np.zeros(64, np.int32)}}, "is of type I32"),
    "half the pairs": ({"tensors": {"rope_freqs.weight": np.ones(4, np.float32)}}, r"pair_factors"),
    "twice scaled": (
        {"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}, "keys": {"rope.scaling.factor": 2.0}},
        r"rope\.scaling\.factor=2\.0",
    ),
    "longrope": ({"keys": {"rope.scaling.type": "longrope"}}, r"rope\.scaling\.type='longrope'"),
    "attention factor": ({"keys": {"rope.scaling.attn_factor": 0.5}}, r"attn_factor=0\.5"),
    "partial rotation": ({"keys": {"rope.dimension_count": 8}}, r"rope\.dimension_count=8"),
    "values of another size": ({"keys": {"attention.value_length": 8}}, r"value_length=8"),
    "experts": ({"keys": {"expert_count": 8}}, "expert_count=8"),
    "scale": ({"keys": {"attention.scale": 0.5}}, r"attention\.scale=0\.5"),
    "soft cap": ({"keys": {"final_logit_softcapping": 30.0}}, r"final_logit_softcapping=30\.0"),
    "unknown key": ({"keys": {"attention.temperature_scale": 2.0}}, r"temperature_scale' is not one that we read"),
    "heads by layer": ({"keys": {"attention.head_count_kv": [2, 2]}}, r"num_key_value_heads=\[2, 2\]"),
    "no epsilon": ({"keys": {"attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon is missing"),
    "no layers": ({"keys": {"block_count": 0}}, "num_hidden_layers=0"),
    "fewer layers": ({"keys": {"block_count": 1}}, r"layers\.1\..*is not one"),
    "no heads": ({"keys": {"attention.head_count": 0}}, "head_count=0"),
    "vocabulary": ({"keys": {"vocab_size": 95}}, "vocab_size=95"),
    "adapter": ({"own_keys": {"general.type": "adapter"}}, "general.type='adapter'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_not_cached(file: Path, cache: Path, name: str) -> None:
    changes, said = REFUSED[name]
    write_gguf(file, small_model(), **changes)
    with pytest.raises(UserError, match=said) as caught:
        load_model(str(file))
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("*-v*"))


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_truncated_file(file: Path, cache: Path, keep: float) -> None:
    write_gguf(file, small_model())
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        load_model(str(file))
    assert not list(cache.glob("*-v*"))


def test_the_other_byte_order(file: Path) -> None:
    other = GGUFEndian.BIG if sys.byteorder == "little" else GGUFEndian.LITTLE
    write_gguf(file, small_model(), GGMLQuantizationType.Q8_0, endianess=other)
    with pytest.raises(CheckpointError, match="in the other order"):
        load_model(str(file))
