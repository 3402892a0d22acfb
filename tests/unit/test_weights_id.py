"""A model is known by its content: another path keeps the identity, another byte changes it."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from dualdecoder import checkpoints, digests
from dualdecoder.checkpoints import weights_id
from dualdecoder.errors import CheckpointError, ConfigError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DUALDECODER_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint with a tokenizer file."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model", max_shard_size="4KB")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path / "model"


def later(monkeypatch, seconds: int = 3600) -> None:
    """Let files that were just written count as settled."""
    now = time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: now() + seconds * 10**9)


def flip_last_byte(file: Path) -> None:
    """Rewrite in place, same size, same modification time."""
    times = file.stat()
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_same_content_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert weights_id(str(folder)) == weights_id(str(tmp_path / "copy"))
    assert weights_id(str(folder)).startswith("sha256:")
    assert len(weights_id(str(folder))) == len("sha256:") + 16


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(
    "file", ["model-00001-of-*.safetensors", "config.json", "generation_config.json", "tokenizer.json"]
)
def test_every_deciding_file_counts_even_rewritten_in_place(
    folder: Path, monkeypatch, file: str, settled: bool
) -> None:
    if settled:
        later(monkeypatch)
    before = weights_id(str(folder))
    flip_last_byte(next(folder.glob(file)))
    assert weights_id(str(folder)) != before


def test_a_write_within_one_tick_of_the_clock_counts(folder: Path, monkeypatch) -> None:
    now = time.time_ns()
    monkeypatch.setattr(digests, "_state", lambda _: (1, now, now, 1, 1))
    before = digests.file_digest(folder / "config.json")
    flip_last_byte(folder / "config.json")
    assert digests.file_digest(folder / "config.json") != before


def test_what_changes_no_answer_does_not_count(folder: Path) -> None:
    before = weights_id(str(folder))
    (folder / "training.log").write_text("done")
    (folder / "consolidated.safetensors").write_bytes(bytes(10))
    (folder / "tokenizer").mkdir()
    assert weights_id(str(folder)) == before


def test_the_index_counts(folder: Path) -> None:
    before = weights_id(str(folder))
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict(reversed(files.items()))}))
    assert weights_id(str(folder)) != before


def test_gguf_is_known_by_content_and_not_converted(tmp_path: Path, own_cache: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"GGUF" + bytes(100))
    shutil.copy(first, second)
    assert weights_id(str(first)) == weights_id(str(second))
    flip_last_byte(second)
    assert weights_id(str(first)) != weights_id(str(second))
    assert not list(own_cache.glob("a-*"))


def test_a_settled_file_is_read_once(folder: Path, monkeypatch) -> None:
    later(monkeypatch)
    first = weights_id(str(folder))
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert weights_id(str(folder)) == first


def test_a_broken_or_unwritable_cache_changes_nothing(folder: Path, own_cache: Path, monkeypatch) -> None:
    later(monkeypatch)
    first = weights_id(str(folder))
    for kept in (own_cache / "digests").iterdir():
        kept.write_bytes(b"\xff half a dig")
    assert weights_id(str(folder)) == first
    (own_cache / "file").write_text("")
    monkeypatch.setenv("DUALDECODER_CACHE", str(own_cache / "file" / "below"))
    assert weights_id(str(folder)) == first


def test_a_file_written_meanwhile_is_said(folder: Path, monkeypatch) -> None:
    read = digests.hashlib.file_digest

    def read_and_change(file, name):
        digest = read(file, name)
        with Path(file.name).open("ab") as handle:
            handle.write(b"x")
        return digest

    monkeypatch.setattr(digests.hashlib, "file_digest", read_and_change)
    with pytest.raises(CheckpointError, match="was written while it was read"):
        weights_id(str(folder))


def test_a_hub_id_is_known_by_its_commit(folder: Path, tmp_path: Path, monkeypatch) -> None:
    snapshot = tmp_path / "snapshots" / ("0123456789" * 4)
    shutil.copytree(folder, snapshot)
    monkeypatch.setattr(checkpoints, "_downloaded", lambda hub_id: snapshot)
    assert weights_id("owner/name") == "commit:" + "0123456789" * 4
    assert weights_id(str(snapshot)) == weights_id(str(folder))


def test_random_embedded_and_unknown() -> None:
    assert weights_id("random:tiny") == "random:tiny"
    assert weights_id("smollm2") == weights_id(str(checkpoints._embedded_gguf()))
    with pytest.raises(ConfigError, match="model shape"):
        weights_id("random:none")
    with pytest.raises(CheckpointError, match="not readable"):
        weights_id("nowhere")


def test_missing_weights_are_named(folder: Path) -> None:
    next(folder.glob("model-00002-*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.* is not readable: No such file"):
        weights_id(str(folder))
