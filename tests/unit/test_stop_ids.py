"""Stop ids are the union of every place that names some, and everything that generates ends at them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from dualdecoder import Engine
from dualdecoder.checkpoints import load_tokenizer, resolve
from dualdecoder.errors import CheckpointError, ConfigError
from dualdecoder.gguf_tokenizer import save_tokenizer, special_ids
from dualdecoder.method import method_config
from dualdecoder.stop_ids import checkpoint_stop_ids

VOCABULARY = 49152
PROMPT = [11, 500, 42, 77, 3000, 9]
NEW = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small model with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("smollm2") / name, folder)
    return folder


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> list[int]:
    """What transformers gives after ``PROMPT`` when nothing stops it; all tokens differ up to the sixth."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    tokens = output[0, len(PROMPT) :].tolist()
    assert len(set(tokens[:6])) == 6
    return tokens


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, to be changed; without a generation config."""
    shutil.copytree(checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns("generation_config.json"))
    return tmp_path / "copy"


def name_stop(folder: Path, file: str, value: object) -> None:
    path = folder / file
    kept = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(kept | {"eos_token_id": value}))


def name_eos(folder: Path, token: int) -> None:
    path = folder / "tokenizer_config.json"
    text = load_tokenizer("smollm2").convert_ids_to_tokens(token)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": text}))


@pytest.mark.parametrize("method", ["full_kv", "dualdecoder"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_file_alone_ends_generation(copy: Path, greedy: list[int], file: str, as_list: bool, method: str) -> None:
    name_stop(copy, file, [5, greedy[3]] if as_list else greedy[3])
    engine = Engine.from_pretrained(str(copy), method=method)
    completion = engine.generate([PROMPT], NEW)[0]
    assert (completion.token_ids, completion.finish_reason) == (greedy[:4], "stop")
    assert [event.token_id for event in engine.stream([PROMPT], NEW)] == greedy[:4]
    assert engine.with_method("full_kv").stop_ids == engine.stop_ids


def test_the_tokenizer_alone_ends_generation(copy: Path, greedy: list[int]) -> None:
    name_eos(copy, greedy[2])
    completion = Engine.from_pretrained(str(copy), method="full_kv").generate([PROMPT], NEW)[0]
    assert (completion.token_ids, completion.finish_reason) == (greedy[:3], "stop")


def test_all_places_together(copy: Path, greedy: list[int]) -> None:
    name_eos(copy, greedy[5])
    name_stop(copy, "config.json", [greedy[4], 7])
    name_stop(copy, "generation_config.json", greedy[1])
    engine = Engine.from_pretrained(str(copy), method="full_kv")
    assert engine.stop_ids == {greedy[5], greedy[4], 7, greedy[1]}
    assert engine.generate([PROMPT], NEW)[0].token_ids == greedy[:2]


def test_null_and_what_the_model_cannot_give_are_left_out(copy: Path) -> None:
    name_stop(copy, "config.json", None)
    name_stop(copy, "generation_config.json", [-1, VOCABULARY, 9])
    assert checkpoint_stop_ids(copy, None, VOCABULARY) == {9}
    tokenizer = load_tokenizer("smollm2")
    assert checkpoint_stop_ids(copy, tokenizer, VOCABULARY) == {9, 2}
    assert checkpoint_stop_ids(copy, tokenizer, 2) == frozenset()


@pytest.mark.parametrize("value", ["2", [[2]], 2.0, True, [2, "3"], {"a": 1}, [None]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_value_of_another_kind_is_refused(copy: Path, file: str, value: object) -> None:
    name_stop(copy, file, value)
    with pytest.raises(CheckpointError, match=rf"{file}: eos_token_id=.* is not allowed; allowed: an integer") as error:
        checkpoint_stop_ids(copy, None, VOCABULARY)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "3", "\udcff", "[" * 100_000])
def test_an_unreadable_generation_config_is_refused(copy: Path, text: str) -> None:
    (copy / "generation_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not readable"):
        checkpoint_stop_ids(copy, None, VOCABULARY)


def test_an_engine_made_by_hand_takes_them(tiny: Engine) -> None:
    full_kv = method_config("full_kv", {})
    free = tiny.generate([[1, 2, 3]], 8)[0].token_ids
    stopped = Engine(tiny.model, None, "full_kv", full_kv, stop_ids=[free[2]]).generate([[1, 2, 3]], 8)[0]
    assert stopped.token_ids == free[: free.index(free[2]) + 1]
    for wrong in ([512], [-1], ["a"], "ab", 3, [True], [1.0]):
        with pytest.raises(ConfigError, match="stop_ids"):
            Engine(tiny.model, None, "full_kv", full_kv, stop_ids=wrong)


def test_a_tokenizer_without_an_end_of_sequence(smollm2: Engine) -> None:
    tokenizer = load_tokenizer("smollm2")
    tokenizer.eos_token = None
    assert Engine(smollm2.model, tokenizer, "full_kv", method_config("full_kv", {})).stop_ids == frozenset()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A GGUF file of nothing but metadata that names three ends and a beginning."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(4)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_a_gguf_file_names_its_ends_whatever_the_conversion_says(gguf: Path, tmp_path: Path, monkeypatch) -> None:
    """transformers 5.17 makes the beginning of sequence the end: answers ran on after ``<|im_end|>``."""
    mistaken = load_tokenizer("smollm2")
    mistaken.eos_token = mistaken.bos_token
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: mistaken)
    save_tokenizer(gguf, tmp_path)
    monkeypatch.undo()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert special_ids(gguf) == {"bos": 1, "eos": 2, "eot": 4, "eom": 5}
    assert checkpoint_stop_ids(tmp_path, tokenizer, VOCABULARY) == {2, 4, 5}


def test_the_embedded_model_ends_at_its_end_of_turn(smollm2: Engine) -> None:
    assert smollm2.tokenizer("<|im_end|>").input_ids[0] in smollm2.stop_ids
    named = json.loads((resolve("smollm2") / "generation_config.json").read_text())["eos_token_id"]
    assert named and set(named) <= smollm2.stop_ids
