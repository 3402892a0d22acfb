"""The cache of converted GGUF files: used again only for the same content, and said to be full where it is."""

import errno
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from small_checkpoints import assert_same, reference_logits, small_model, write_gguf

from dualdecoder import gguf_conversion, planning
from dualdecoder.checkpoints import load_model, resolve
from dualdecoder.errors import CapacityError, CheckpointError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("DUALDECODER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_weights_that_do_not_fit_are_not_converted(file: Path, cache: Path, monkeypatch) -> None:
    write_gguf(file, small_model())
    monkeypatch.setattr(planning.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
    with pytest.raises(CapacityError, match="bytes needed for the weights of model"):
        load_model(str(file))
    assert not list(cache.glob("*-v*"))


def test_two_processes_convert_the_same_file(file: Path, monkeypatch) -> None:
    model = small_model()
    write_gguf(file, model)
    write = gguf_conversion._write_tokenizer

    def other_is_faster(*arguments: Any) -> None:
        write(*arguments)
        monkeypatch.setattr(gguf_conversion, "_write_tokenizer", write)
        resolve(str(file))

    monkeypatch.setattr(gguf_conversion, "_write_tokenizer", other_is_faster)
    assert_same(file, reference_logits(model))
    assert len(list(resolve(str(file)).parent.glob("model-v*"))) == 1


def test_an_earlier_conversion_is_not_used_again(file: Path, cache: Path, monkeypatch) -> None:
    model = small_model()
    write_gguf(file, model)
    monkeypatch.setattr(gguf_conversion, "VERSION", gguf_conversion.VERSION - 1)
    bad = resolve(str(file))
    shutil.rmtree(bad)
    bad.mkdir()
    monkeypatch.undo()
    monkeypatch.setenv("DUALDECODER_CACHE", str(cache))
    assert resolve(str(file)) != bad
    assert_same(file, reference_logits(model))


def test_an_overwritten_file_is_converted_again(file: Path) -> None:
    for seed in (0, 1):
        model = small_model(seed=seed)
        write_gguf(file, model)
        assert_same(file, reference_logits(model))


def test_a_converted_file_is_not_read_again(file: Path, monkeypatch) -> None:
    write_gguf(file, small_model())
    folder = resolve(str(file))
    monkeypatch.setattr(gguf_conversion, "read_gguf", lambda _: pytest.fail("converted twice"))
    assert resolve(str(file)) == folder


@pytest.mark.parametrize("failure", ["no folder", "too little", "while writing", "in Rust"])
def test_a_full_or_unwritable_cache_is_said_to_be_one(file: Path, cache: Path, monkeypatch, failure: str) -> None:
    write_gguf(file, small_model())
    if failure == "no folder":
        cache.write_text("a file where the folder should be")
    if failure == "too little":
        monkeypatch.setattr(gguf_conversion.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1000))
    full = {
        "while writing": OSError(errno.ENOSPC, "No space left on device"),
        "in Rust": SafetensorError("I/O error: No space left on device (os error 28)"),
    }
    if failure in full:

        def fail(*_: Any) -> None:
            raise full[failure]

        monkeypatch.setattr(gguf_conversion, "_write_model", fail)
    with pytest.raises(CheckpointError, match=r"the cache '.*' cannot be written: .*DUALDECODER_CACHE") as caught:
        load_model(str(file))
    assert "GGUF" not in str(caught.value)
    assert not list(cache.glob("*-v*"))
