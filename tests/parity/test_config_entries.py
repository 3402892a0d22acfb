"""Every entry of config.json, damaged in every way: transformers' logits, or one line that names what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from small_checkpoints import ROPES, TOKENS, assert_same, edit_config, loaded_reference, our_logits, small_model
from torch import Tensor

from dualdecoder.checkpoints import load_model, load_tokenizer
from dualdecoder.config_file import RULES
from dualdecoder.errors import ConfigError, UserError

DAMAGE = {
    "missing": ...,
    "null": None,
    "text": "4",
    "float": 2.0,
    "true": True,
    "negative": -1,
    "zero": 0,
    "huge": 10**12,
    "larger than a float": 10**400,
    "infinite": float("inf"),
    "nan": float("nan"),
    "list": [],
    "nested": {"a": [{}]},
    "two": 2,
}
YARN = ROPES["yarn"] | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": ROPES["llama3"]},
    "mistral": {"rope_parameters": ROPES["linear"], "sliding_window": 256},
    "qwen2": {"rope_parameters": YARN | {"attention_factor": 1.1}},
    "qwen3": {"rope_parameters": YARN, "tie_word_embeddings": True},
}


# Two families show every entry; all four take a while.
FAST = ("llama", "qwen3")
PARAMS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]


@pytest.fixture(scope="module", params=PARAMS)
def original(request, tmp_path_factory) -> tuple[Path, Tensor]:
    """A checkpoint and the logits that transformers gets from it."""
    folder = tmp_path_factory.mktemp(request.param)
    small_model(request.param, **MODELS[request.param]).save_pretrained(folder)
    return folder, loaded_reference(folder)


@pytest.fixture
def copy(original: tuple[Path, Tensor], tmp_path: Path) -> Path:
    for file in original[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text((original[0] / "config.json").read_text())
    return tmp_path


def right_or_refused(folder: Path, original: Tensor, name: str, changes_nothing: bool = False) -> None:
    """``original``: the logits of the undamaged model, which an entry that is not read cannot change."""
    try:
        ours = our_logits(folder)
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
        assert "config.json" in str(error) or "weight" in str(error)
        return
    expected = original if changes_nothing else reference_or(original, folder)
    assert (ours - expected[: len(ours)]).abs().max() < 1e-3, name


def reference_or(original: Tensor, folder: Path) -> Tensor:
    """transformers' logits; where it fails, what is not damaged has to be read as if the entry was not there."""
    try:
        return loaded_reference(folder)
    except (TypeError, ValueError, StrictDataclassError):
        return original


@pytest.mark.parametrize("damage", DAMAGE)
def test_entries(original: tuple[Path, Tensor], copy: Path, damage: str) -> None:
    text = (copy / "config.json").read_text()
    for name in sorted({*json.loads(text), *RULES}):
        edit_config(copy, **{name: DAMAGE[damage]})
        right_or_refused(copy, original[1], name, changes_nothing=name not in (*RULES, "model_type"))
        (copy / "config.json").write_text(text)


@pytest.mark.parametrize("damage", DAMAGE)
def test_rope_entries(original: tuple[Path, Tensor], copy: Path, damage: str) -> None:
    text = (copy / "config.json").read_text()
    rope = json.loads(text)["rope_parameters"]
    for name in (*rope, "partial_rotary_factor", "surprise"):
        changed = {key: value for key, value in (rope | {name: DAMAGE[damage]}).items() if value is not ...}
        edit_config(copy, rope_parameters=changed)
        right_or_refused(copy, original[1], name)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"llama"', "[" * 100_000, "1" * 5000, '{"model_type": "\ud800"}']
)
def test_files_that_are_no_config(copy: Path, text: str) -> None:
    (copy / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(str(copy))


def test_the_message_names_the_entry_and_what_is_allowed(copy: Path) -> None:
    for changes, said in (
        ({"num_attention_heads": 4.0}, r"num_attention_heads=4\.0 is not allowed; allowed: an integer from 1 to"),
        ({"hidden_size": ...}, "hidden_size is missing; allowed: an integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 is not allowed; allowed: a number above 0"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None is not allowed; allowed: true or false"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000 is not allowed"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not allowed; .* 4096"),
        ({"intermediate_size": 2**31 - 1}, "needs .* by the config"),
    ):
        text = (copy / "config.json").read_text()
        edit_config(copy, **changes)
        with pytest.raises(UserError, match=said):
            load_model(str(copy))
        (copy / "config.json").write_text(text)


YARN_FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention_factor": {"attention_factor": 0.7},
    "equal mscales": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "other mscales": {"mscale": 0.707, "mscale_all_dim": 1.2},
    "one mscale": {"mscale": 0.5},
    "mscale of zero": {"mscale": 0.5, "mscale_all_dim": 0},
    "factor and mscales": {"attention_factor": 1.3, "mscale": 0.7, "mscale_all_dim": 1.2},
    "not truncated": {"truncate": False},
    "betas": {"beta_fast": 4.0, "beta_slow": 0.5},
    "betas of null": {"beta_fast": None, "beta_slow": None},
    "no factor": {"factor": None},
    "a tiny original length": {"original_max_position_embeddings": 4},
    "betas the wrong way round": {"beta_fast": 1.0, "beta_slow": 8.0, "truncate": False},
}


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", YARN_FIELDS)
def test_yarn_as_in_transformers(tmp_path: Path, name: str, style: str) -> None:
    small_model("qwen2").save_pretrained(tmp_path)
    rope = ROPES["yarn"] | YARN_FIELDS[name]
    if style == "rope_parameters":
        edit_config(tmp_path, rope_parameters=rope)
    else:
        kind, theta = rope.pop("rope_type"), rope.pop("rope_theta")
        edit_config(tmp_path, rope_parameters=..., rope_theta=theta, rope_scaling={"type": kind} | rope)
    assert_same(tmp_path, loaded_reference(tmp_path))


@pytest.mark.parametrize("name", ROPES)
def test_the_old_style_of_every_kind(tmp_path: Path, name: str) -> None:
    small_model().save_pretrained(tmp_path)
    rope = dict(ROPES[name])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    scaling = None if name == "default" else {"type": kind} | rope
    edit_config(tmp_path, rope_parameters=..., rope_theta=theta, rope_scaling=scaling)
    assert_same(tmp_path, loaded_reference(tmp_path))


def test_one_list_of_longrope(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 8.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    rope |= {"attention_factor": 1.1, "original_max_position_embeddings": 64, "factor": 8.0}
    small_model(rope_parameters=rope).save_pretrained(tmp_path)
    assert_same(tmp_path, loaded_reference(tmp_path))
    edit_config(tmp_path, rope_parameters=rope | {"long_factor": factors[::-1]})
    with pytest.raises(ConfigError, match="short_factor"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"rope_parameters": ROPES["yarn"]}, 512),
        ({"rope_parameters": ROPES["yarn"] | {"factor": 2.5}}, 320),
        ({"rope_parameters": ROPES["yarn"] | {"factor": None}}, 512),
        ({"rope_parameters": ROPES["yarn"], "max_position_embeddings": 128}, 512),
        ({"rope_parameters": ROPES["yarn"], "max_position_embeddings": 2048}, 512),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, 1024),
        ({"rope_parameters": ROPES["linear"]}, 512),
        ({"rope_parameters": ROPES["llama3"]}, 512),
        (
            {
                "rope_parameters": ROPES["yarn"],
                "use_sliding_window": True,
                "sliding_window": 96,
                "max_window_layers": 1,
            },
            96,
        ),
        ({"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 2}, 512),
        ({"use_sliding_window": False, "sliding_window": 96}, 512),
    ],
)
def test_the_context(tmp_path: Path, changes: dict[str, Any], context: int) -> None:
    small_model("qwen2").save_pretrained(tmp_path)
    edit_config(tmp_path, layer_types=..., **changes)
    assert load_model(str(tmp_path)).config.max_context == context


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_within_the_window_as_transformers(tmp_path: Path, family: str) -> None:
    sliding = {"sliding_window": len(TOKENS), "use_sliding_window": True, "max_window_layers": 1}
    small_model(family, **sliding).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).config.max_context == len(TOKENS)
    assert_same(tmp_path, loaded_reference(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}}, "'su'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_parameters": ROPES["default"] | {"mrope_section": [2, 3, 3]}}, "mrope_section"),
        ({"rope_parameters": ROPES["linear"] | {"beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": ROPES["linear"]}, "rope_scaling"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rotary_pct": 0.5}, "rotary_pct"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"compression_config": {"format": "marlin"}}, "compression_config"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"model_type": "mixtral"}, "mixtral"),
    ],
)
def test_variants_that_are_not_read(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    small_model("qwen2").save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=said) as caught:
        load_model(str(tmp_path))
    assert "config.json" in str(caught.value)


def test_the_tokenizer_of_a_bad_config(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text("{}")
    edit_config(copy, num_attention_heads=4.0)
    with pytest.raises(UserError, match=r"num_attention_heads=4\.0 is not allowed|no readable tokenizer"):
        load_tokenizer(str(copy))
    with pytest.raises(ConfigError, match=r"num_attention_heads=4\.0 is not allowed"):
        load_model(str(copy))


def test_nothing_of_the_size_of_an_entry_is_allocated(copy: Path) -> None:
    edit_config(copy, num_labels=10**12, max_window_layers=2**31 - 1)
    assert torch.isfinite(our_logits(copy)).all()
