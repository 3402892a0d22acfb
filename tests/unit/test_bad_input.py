"""Everything a user can get wrong gives one error that names the field and what is allowed (design section 9)."""

import json
import subprocess
import sys
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from dualdecoder import planning
from dualdecoder.checkpoints import load_model, load_tokenizer
from dualdecoder.config import ModelConfig, RopeConfig, SamplingConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import CapacityError, CheckpointError, ConfigError

BAD_OPTIONS = {
    "budget": [0, 4, 100, -8],
    "chunk": [0, -1],
    "local": [0, 12],
    "window": [8, 40, 65],
    "outliers_per_1024": [-1],
    "speculation": ["magic"],
    "schedule": ["later"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD_OPTIONS.items() for v in values])
def test_method_options(tiny: Engine, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value!r} is not allowed; allowed: ."):
        tiny.with_method("dualdecoder", **{field: value})


@pytest.mark.parametrize("value", ["256", 256.5, None, True])
def test_budget_must_be_an_integer(tiny: Engine, value: object) -> None:
    with pytest.raises(ConfigError, match="budget="):
        tiny.with_method("dualdecoder", budget=value)


def test_unknown_option_lists_the_known(tiny: Engine) -> None:
    with pytest.raises(ConfigError, match=r"option budgte of method dualdecoder=256 is not allowed.*budget, chunk"):
        tiny.with_method("dualdecoder", budgte=256)


@pytest.mark.parametrize(
    "name", ["dual", "no.such:Class", "dualdecoder.dual:Nothing", "dualdecoder.config:ModelConfig"]
)
def test_unknown_method(tiny: Engine, name: str) -> None:
    with pytest.raises(ConfigError, match="method="):
        tiny.with_method(name)


@pytest.mark.parametrize(
    "sampling", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")}]
)
def test_sampling(sampling: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(sampling))):
        SamplingConfig(**sampling)


def test_dtype_and_device() -> None:
    with pytest.raises(ConfigError, match="dtype='int8' is not allowed; allowed: float32"):
        Engine.from_pretrained("random:tiny", dtype="int8")
    with pytest.raises(ConfigError, match="device='tpu' is not allowed"):
        Engine.from_pretrained("random:tiny", device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="device='cuda' is not allowed"):
        Engine.from_pretrained("random:tiny", method="dualdecoder", device="cuda")


def test_context_longer_than_the_model(tiny: Engine, random_ids) -> None:
    with pytest.raises(CapacityError, match=r"prompts\[1\]: 4090 tokens \+ max_new_tokens=7 = 4097.*at most 4096"):
        tiny.generate([[1, 2], random_ids(4090)], max_new_tokens=7)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([], "prompts"),
        ([[]], r"prompts\[0\]"),
        ([[1], [512]], r"prompts\[1\]"),
        ([[-1]], r"prompts\[0\]"),
        ("abc", "prompts"),
    ],
)
def test_prompts(tiny: Engine, prompts: object, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        tiny.generate(prompts, max_new_tokens=2)


def test_new_tokens(tiny: Engine) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        tiny.generate([[1]], max_new_tokens=0)


def test_text_without_a_tokenizer(tiny: Engine) -> None:
    with pytest.raises(ConfigError, match="pass token ids"):
        tiny.generate(["text"])
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer("random:tiny")
    with pytest.raises(ConfigError, match="chat template"):
        tiny.chat("hello")


def test_too_little_memory_is_said_before_allocating(tiny: Engine, monkeypatch) -> None:
    monkeypatch.setattr(planning.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
    with pytest.raises(CapacityError, match=r"host memory: [\d,]+ bytes needed for keys and values, 1,000 available"):
        tiny.generate([[1, 2, 3]], max_new_tokens=2)


def test_weights_that_do_not_fit_are_not_loaded(monkeypatch) -> None:
    monkeypatch.setattr(planning.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=10**9))
    with pytest.raises(
        CapacityError, match=r"16,060,522,496 bytes needed for the weights of llama-3-8b, 1,000,000,000"
    ):
        load_model("random:llama-3-8b", torch.bfloat16)


@pytest.fixture
def checkpoint(tmp_path):
    """A small real checkpoint folder to damage."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_truncated_safetensors(checkpoint) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_model(str(checkpoint))


def test_missing_and_misshapen_weights(checkpoint) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is missing"):
        load_model(str(checkpoint))
    save_file(weights | {"model.norm.weight": norm[:-1]}, file)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \(15,\), needs \(16,\)"):
        load_model(str(checkpoint))


def test_pickled_weights_are_not_read(checkpoint) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only safetensors are read.*pytorch_model\.bin"):
        load_model(str(checkpoint))


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_broken_index(checkpoint, index: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json|is missing"):
        load_model(str(checkpoint))


def test_broken_config(checkpoint) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(str(checkpoint))


def test_remote_code_is_not_run(checkpoint) -> None:
    (checkpoint / "evil.py").write_text("raise SystemExit('ran')")
    change_config(checkpoint, model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(str(checkpoint))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type='dynamic'",
        ),
    ],
)
def test_unsupported_architecture(checkpoint, changes: dict, field: str) -> None:
    change_config(checkpoint, **changes)
    with pytest.raises(ConfigError, match=field):
        load_model(str(checkpoint))


def test_sliding_window_limits_the_context() -> None:
    config = MistralConfig(max_position_embeddings=32768, sliding_window=4096)
    assert ModelConfig.from_transformers(config, "m").max_context == 4096


@pytest.mark.parametrize("source", ["nowhere", "a/b/c", "random:gpt-5", ""])
def test_unknown_source(source: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match="model"):
        load_model(source)


def test_missing_and_broken_gguf(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DUALDECODER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="no such file"):
        load_model(str(tmp_path / "none.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(CheckpointError, match="not a readable GGUF file"):
        load_model(str(tmp_path / "broken.gguf"))
    assert not list(tmp_path.glob("cache/*"))


def test_model_shapes() -> None:
    good = {"layers": 2, "width": 8, "mlp_width": 8, "query_heads": 4, "kv_heads": 2, "head_dim": 4}
    rest = {"name": "m", "vocabulary": 8, "max_context": 8}
    for changes, field in (({"layers": 0}, "layers"), ({"kv_heads": 3}, "query_heads"), ({"head_dim": 3}, "head_dim")):
        with pytest.raises(ConfigError, match=field):
            ModelConfig(**(good | changes), **rest)
    with pytest.raises(ConfigError, match=r"rope\.kind"):
        RopeConfig(kind="spiral")


def test_a_single_layer_cannot_alternate_buffers() -> None:
    from dualdecoder.config import DualDecoderConfig
    from dualdecoder.dual import DualDecoder

    shape = ModelConfig("m", 1, 8, 8, 2, 2, 4, 8, 8)
    with pytest.raises(ConfigError, match="layers"):
        DualDecoder.plan(shape, DualDecoderConfig(), 1, 8, torch.float32)


def test_importing_needs_neither_cuda_nor_triton() -> None:
    code = (
        "import sys, importlib\n"
        "sys.modules['triton'] = None\n"
        "[importlib.import_module(f'dualdecoder.{m}') for m in ('engine', 'dual', 'cli')]\n"
        "import baselines.full_kv, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
