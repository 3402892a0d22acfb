"""Folders with safetensors: every stored tensor is used or harmless and every needed one is there, or it is named."""

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from small_checkpoints import assert_same, edit_config, loaded_reference, our_logits, small_model
from torch import Tensor

from dualdecoder import checkpoints
from dualdecoder.checkpoints import load_model, weights_id
from dualdecoder.errors import CheckpointError, ConfigError, UserError

Weights = dict[str, Tensor]
Q = "model.layers.0.self_attn.q_proj"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    small_model().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def change(folder: Path, how: Callable[[Weights], Weights]) -> None:
    save_file(how(load_file(folder / SINGLE)), folder / SINGLE, metadata={"format": "pt"})


def cast(dtype: torch.dtype) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {f"{Q}.weight": weights[f"{Q}.weight"].to(dtype)}


def added(name: str, value: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: value}


DAMAGE: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "fp8": (cast(torch.float8_e4m3fn), "is of type F8_E4M3; allowed: F32, F16, BF16"),
    "int8": (cast(torch.int8), "is of type I8"),
    "float64": (cast(torch.float64), "is of type F64"),
    "scale": (added(f"{Q}.weight_scale", torch.ones(64, 1)), "weight_scale' is not one"),
    "bias": (added(f"{Q}.bias", torch.ones(64)), "bias' is not one"),
    "adapter": (added(f"{Q}.lora_A.weight", torch.ones(4, 64)), "lora_A"),
    "third layer": (added("model.layers.2.input_layernorm.weight", torch.ones(64)), r"layers\.2"),
    "sinks": (added("model.layers.0.self_attn.sinks", torch.ones(4)), "sinks"),
    "no head": (
        lambda weights: {n: w for n, w in weights.items() if n != "lm_head.weight"},
        "lm_head.weight' is missing",
    ),
    "no prefix": (lambda weights: {n.removeprefix("model."): w for n, w in weights.items()}, "embed_tokens.*missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights(folder: Path, name: str) -> None:
    how, said = DAMAGE[name]
    change(folder, how)
    with pytest.raises(CheckpointError, match=said):
        load_model(str(folder))


def test_harmless_tensors(folder: Path) -> None:
    expected = loaded_reference(folder)
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        change(folder, added(name, torch.ones(8)))
    assert_same(folder, expected)


def test_half_precision_and_mixed(folder: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        change(folder, cast(dtype))
        assert_same(folder, loaded_reference(folder))


@pytest.mark.parametrize(
    "file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json", "adapter_config.json"]
)
def test_files_that_say_the_weights_are_not_the_weights(folder: Path, file: str) -> None:
    (folder / file).write_text("{}")
    with pytest.raises(CheckpointError, match=file):
        load_model(str(folder))


def tie(folder: Path, head: str) -> None:
    edit_config(folder, tie_word_embeddings=True)
    weights = load_file(folder / SINGLE)
    if head == "equal":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if head == "absent":
        del weights["lm_head.weight"]
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("head", ["another", "equal", "absent"])
def test_a_tied_config_and_the_stored_head(folder: Path, head: str) -> None:
    tie(folder, head)
    assert_same(folder, loaded_reference(folder))
    model = load_model(str(folder))
    assert (model.unembedding_VE is model.embedding_VE) == (head != "another") == model.config.tied_embeddings


def test_a_head_of_another_shape(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    change(folder, added("lm_head.weight", torch.ones(95, 64)))
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' has shape"):
        load_model(str(folder))


def reindex(folder: Path, how: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": how(index["weight_map"])}))


def test_index_and_shards_that_disagree(shards: Path) -> None:
    kept = (shards / INDEX).read_text()
    norm = "model.layers.0.input_layernorm.weight"
    reindex(shards, lambda files: {name: file for name, file in files.items() if name != norm})
    with pytest.raises(CheckpointError, match=rf"'{norm}' is missing in the index"):
        load_model(str(shards))
    (shards / INDEX).write_text(kept)
    reindex(shards, lambda files: files | {f"{Q}.bias": files[f"{Q}.weight"]})
    with pytest.raises(CheckpointError, match=r"q_proj\.bias' is missing in model-0"):
        load_model(str(shards))


def test_a_weight_in_two_shards(shards: Path) -> None:
    files = json.loads((shards / INDEX).read_text())["weight_map"]
    other = shards / files["lm_head.weight"]
    assert files[f"{Q}.weight"] != files["lm_head.weight"]
    save_file(load_file(other) | {f"{Q}.weight": torch.zeros(64, 64)}, other, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="stored twice"):
        load_model(str(shards))


def test_a_single_file_beside_an_index_of_others(shards: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, shards / SINGLE)
    for read in (load_model, weights_id):
        with pytest.raises(CheckpointError, match="remove what does not belong"):
            read(str(shards))


def test_a_missing_shard(shards: Path) -> None:
    next(shards.glob("model-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.* is missing"):
        load_model(str(shards))


@pytest.mark.parametrize("source", [None, 5, "", ["a"], "x" * 5000, "a\0b", "~nobody-of-this-name/model"])
def test_sources_of_other_kinds(source: object) -> None:
    with pytest.raises(UserError) as caught:
        load_model(source)
    assert "\n" not in str(caught.value)


def test_a_path_is_a_source(folder: Path) -> None:
    assert torch.equal(load_model(folder).final_norm_E, load_model(str(folder)).final_norm_E)
    assert weights_id(folder) == weights_id(str(folder))


REPOSITORY = [
    "README.md", "config.json", "consolidated.safetensors", "generation_config.json", "hf_quant_config.json",
    "params.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX,
    "model.fp16.safetensors", "onnx/config.json", "onnx/model.safetensors", "original/consolidated.00.pth",
    "pytorch_model.bin", "tokenizer.json",
    "tokenizer_config.json", "training_args.bin", "vocab.json", "merges.txt", "chat_template.jinja",
]  # fmt: skip


def hub(monkeypatch, snapshot: Path, files: list[str]) -> list[tuple[str | None, set[str]]]:
    """A hub with ``files`` that gives ``snapshot``; returns what is asked of it: the revision and the files."""
    asked = []

    def download(_: str, allow_patterns: list[str], ignore_patterns: str, revision: str | None = None) -> str:
        named = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        asked.append((revision, set(named)))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_a_hub_download_takes_what_the_index_names(tmp_path: Path, monkeypatch) -> None:
    snapshot = tmp_path / ("a1" * 20)
    snapshot.mkdir()
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (snapshot / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    asked = hub(monkeypatch, snapshot, REPOSITORY)
    checkpoints._downloaded("owner/name")
    (first, described), (second, weights) = asked
    assert (first, second) == (None, snapshot.name)
    assert weights == set(shards)
    small = {name for name in REPOSITORY if name.startswith(("config", "gen", "hf_", "tok", "vocab", "merges", "chat"))}
    assert described == small | {INDEX}


def test_a_hub_download_without_an_index_takes_the_single_file(tmp_path: Path, monkeypatch) -> None:
    asked = hub(monkeypatch, tmp_path, [*REPOSITORY, SINGLE])
    checkpoints._downloaded("owner/name")
    assert asked[1] == (None, {SINGLE})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "the hub's cache cannot be written"),
        (ValueError("no\nsuch"), "no such"),
    ],
)
def test_what_the_hub_says(monkeypatch, error: Exception, said: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model("owner/name")
    assert "\n" not in str(caught.value)


def test_needs_code_of_its_own(folder: Path) -> None:
    edit_config(folder, model_type="other", auto_map={"AutoConfig": "x.Y"})
    with pytest.raises(CheckpointError, match="code of the checkpoint"):
        load_model(str(folder))
    edit_config(folder, auto_map=...)
    with pytest.raises(ConfigError, match="model_type='other'"):
        our_logits(folder)
