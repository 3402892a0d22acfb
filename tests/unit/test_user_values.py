"""Values of a wrong type from a user of the API: refused in one line with the field, or taken for what they mean."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dualdecoder import Engine, SamplingConfig, load_model, plan_memory
from dualdecoder.checkpoints import load_tokenizer, resolve
from dualdecoder.errors import ConfigError, UserError
from dualdecoder.method import method_class, method_config
from dualdecoder.prompts import chat_text
from dualdecoder.shapes import SHAPES


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], r"prompts\[0\]=1 is not allowed; allowed: text, or a list of token ids"),
        ([None], r"prompts\[0\]=None is not allowed"),
        ([[1], [1.0, 2.0]], r"prompts\[1\]: token id=1\.0 is not allowed"),
        ([[1, None]], r"prompts\[0\]: token id=None"),
        ([[1, True]], r"prompts\[0\]: token id=True"),
        ([["a"]], r"prompts\[0\]: token id='a'"),
        ([[[1, 2]]], r"prompts\[0\]: token id=\[1, 2\]"),
        ([b"abc"], r"prompts\[0\]=b'abc'"),
        ([{1: 2}], r"prompts\[0\]=\{1: 2\}"),
        ([{1, 2}], r"prompts\[0\]=\{1, 2\}"),
        ([(token for token in (1, 2))], r"prompts\[0\]=<generator"),
        ([torch.tensor([0.5])], r"prompts\[0\]: token id=0\.5"),
        ([np.array([[1, 2]])], r"prompts\[0\]: token id=\[1, 2\]"),
        ([torch.tensor(3)], r"prompts\[0\]=tensor\(3\)"),
        (torch.tensor([1, 2]), r"prompts\[0\]=tensor\(1\)"),
        (None, "prompts=None is not allowed; allowed: a list of prompts"),
        ({"prompt": [1]}, "prompts=.* is not allowed; allowed: a list of prompts"),
        (7, "prompts=7 is not allowed; allowed: a list of prompts"),
    ],
)
def test_prompts_of_another_kind(tiny: Engine, prompts: object, message: str) -> None:
    for call in (tiny.generate, lambda *a: list(tiny.stream(*a)), lambda *a: tiny.start(*a)):
        with pytest.raises(ConfigError, match=message) as error:
            call(prompts, 2)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "prompts",
    [
        ([5, 6, 7],),
        [(5, 6, 7)],
        [range(5, 8)],
        [np.array([5, 6, 7])],
        [np.array([5, 6, 7], dtype=np.uint16)],
        [torch.tensor([5, 6, 7])],
        [[np.int64(5), 6, np.int32(7)]],
        np.array([[5, 6, 7]]),
        torch.tensor([[5, 6, 7]]),
    ],
)
def test_arrays_and_tensors_are_token_ids(tiny: Engine, prompts: object) -> None:
    completion = tiny.generate(prompts, np.int64(4))[0]
    assert completion == tiny.generate([[5, 6, 7]], 4)[0]
    assert all(type(token) is int for token in tiny.encode(prompts[0]))


def test_a_long_wrong_prompt_gives_a_short_message(tiny: Engine) -> None:
    with pytest.raises(ConfigError) as error:
        tiny.generate([dict.fromkeys(range(100000), 1)], 2)
    assert len(str(error.value)) < 600


def test_text_that_is_no_unicode(smollm2: Engine) -> None:
    with pytest.raises(ConfigError, match=r"prompts\[1\]: character 2 is half of one; allowed: whole Unicode text"):
        smollm2.generate(["fine", "ab\ud800"], 2)


@pytest.mark.parametrize("value", [2.5, 2.0, "3", None, True, 0, -1, [4], float("nan"), float("inf")])
def test_new_tokens_of_another_kind(tiny: Engine, value: object) -> None:
    with pytest.raises(ConfigError, match=r"^max_new_tokens=.* is not allowed; allowed: an integer of at least 1$"):
        tiny.generate([[1]], value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in ("1", None, True, float("inf"), float("nan"), -0.1, [1])),
        *(("top_k", value) for value in (2.0, "5", True, 0, -3)),
        *(("top_p", value) for value in ("0.9", True, 0, 1.01, float("nan"))),
        *(("seed", value) for value in (-1, 2**63, 1.0, None, "0", True)),
    ],
)
def test_sampling_of_another_kind(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}=.* is not allowed; allowed: "):
        SamplingConfig(**{field: value})


def test_sampling_takes_numbers_of_numpy_and_the_largest_seed(tiny: Engine) -> None:
    plain = SamplingConfig(0.5, 7, 0.5, 2**63 - 1)
    numpy = SamplingConfig(np.float32(0.5), np.int64(7), np.float64(0.5), np.uint64(2**63 - 1))
    engine = tiny.with_method("dualdecoder", speculation="random")
    assert engine.generate([[1, 2, 3]], 6, plain) == engine.generate([[1, 2, 3]], 6, numpy)
    with pytest.raises(ConfigError, match="sampling="):
        tiny.generate([[1]], 2, {"temperature": 1})


TEMPLATES = {
    "raises": "{{ raise_exception('System role not supported') }}",
    "is broken": "{% for message in messages %}",
    "uses what is not there": "{{ messages[0].content.no.such }}",
    "divides by zero": "{{ 1 / 0 }}",
    "adds a number to a text": "{{ 'a' + 1 }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_that_refuses(smollm2: Engine, template: str) -> None:
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = template
    engine = Engine(smollm2.model, tokenizer, "full_kv", smollm2.config)
    with pytest.raises(
        ConfigError, match=r"^chat: the model's chat template refuses the message: .+; pass plain"
    ) as error:
        engine.chat("hello")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="refuses the message"):
        chat_text(tokenizer, [{"role": "system", "content": "x"}], continue_final_message=True)


@pytest.mark.parametrize("message", [None, 3, ["hello"], b"hello", {"role": "user"}])
def test_a_message_of_another_kind(smollm2: Engine, message: object) -> None:
    with pytest.raises(ConfigError, match=r"^chat: message=.* is not allowed; allowed: text$"):
        smollm2.chat(message)


@pytest.mark.parametrize(
    "device", ["foo", "cuda:99", "cuda:x", "", "cpu:1", "meta", "mps", None, 0, torch.device("meta")]
)
def test_devices_that_are_not_there(device: object) -> None:
    for load in (
        lambda: Engine.from_pretrained("random:tiny", device=device),
        lambda: load_model("random:tiny", device=device),
    ):
        with pytest.raises(ConfigError, match=r"^device='.*' is not allowed; allowed: cpu[^\n]*this machine\)$"):
            load()


@pytest.mark.parametrize(
    "dtype", ["int8", "torch.float64", "fp16", "", None, 32, torch.int8, torch.float64, ["float32"]]
)
def test_dtypes_that_do_not_exist(dtype: object) -> None:
    config = method_config("full_kv", {})
    for call in (
        lambda: Engine.from_pretrained("random:tiny", dtype=dtype),
        lambda: load_model("random:tiny", dtype),
        lambda: plan_memory(SHAPES["tiny"], "full_kv", config, 1, 8, dtype),
    ):
        with pytest.raises(ConfigError, match=r"^dtype=.* is not allowed; allowed: float32, bfloat16, float16$"):
            call()


def test_paths_and_objects_of_torch_are_taken() -> None:
    folder = resolve("smollm2")
    assert isinstance(folder, Path)
    engine = Engine.from_pretrained(folder, method="full_kv", dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (engine.model.dtype, engine.model.device) == (torch.bfloat16, torch.device("cpu"))
    assert engine.stop_ids == {2}
    assert load_model("random:tiny", "float16", torch.device("cpu", 0)).dtype == torch.float16
    config = method_config("full_kv", {})
    by_name, by_object = (plan_memory(SHAPES["tiny"], "full_kv", config, 2, 64, d) for d in ("float16", torch.float16))
    assert by_name == by_object


@pytest.mark.parametrize(("batch", "context"), [(2.0, 8), ("2", 8), (0, 8), (True, 8), (1, 8.5), (1, None), (1, -1)])
def test_sizes_of_a_plan(batch: object, context: object) -> None:
    with pytest.raises(ConfigError, match=r"^(batch|context)=.* is not allowed; allowed: an integer of at least 1$"):
        plan_memory(SHAPES["tiny"], "full_kv", method_config("full_kv", {}), batch, context, "float32")


@pytest.mark.parametrize(
    "name", [None, 3, ["full_kv"], "", ":Class", ".relative:Class", "os:path", "dualdecoder.method:KVMethod"]
)
def test_methods_that_are_none(name: object) -> None:
    with pytest.raises(ConfigError, match=r"^method=[^\n]*$"):
        method_class(name)


def test_a_dotted_method_whose_module_is_broken(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, text in enumerate(("def broken(:\n", "1 / 0\n", "raise RuntimeError('two\\nlines')\n")):
        (tmp_path / f"broken_{number}.py").write_text(text)
        with pytest.raises(
            UserError, match=rf"^method='broken_{number}:M': broken_{number}:M cannot be imported: \w+Error: [^\n]*$"
        ):
            method_class(f"broken_{number}:M")
