"""GGUF files converted once into safetensors folders of the user's cache."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError

from dualdecoder.cache import cache_folder, is_unwritable
from dualdecoder.config_file import CONFIG
from dualdecoder.digests import content_digest
from dualdecoder.errors import CheckpointError, one_line
from dualdecoder.gguf_file import GgufModel, gguf_parts, read_gguf
from dualdecoder.gguf_tokenizer import save_tokenizer
from dualdecoder.planning import check_weights
from dualdecoder.safetensors_folder import SINGLE

# Part of a converted folder's name, raised with every change of what conversion makes of the same file.
VERSION = 3


def gguf_digest(path: Path) -> str:
    """Digest of the content of a GGUF file and of its further parts; raises ``CheckpointError`` if one is missing."""
    return content_digest({f"part {number:05}": part for number, part in enumerate(gguf_parts(path))})


def converted(path: Path) -> Path:
    """The safetensors folder of a GGUF file, converted now unless it was before.

    Raises ``CheckpointError`` or ``ConfigError`` naming what is not understood, or the cache if it cannot be written,
    and ``CapacityError`` if the weights do not fit in memory as float32; nothing is kept then.
    """
    digest = gguf_digest(path).partition(":")[2]
    folder = cache_folder() / f"{path.stem}-v{VERSION}-{digest}"
    if not folder.is_dir():
        _convert(path, read_gguf(path), folder)
    return folder


def _convert(path: Path, model: GgufModel, folder: Path) -> None:
    check_weights(model.config, torch.float32, torch.device("cpu"))
    # Written aside and renamed, so that an interrupted conversion is never taken for a finished one.
    temporary = _writable(folder.parent, folder.name, model.float32_bytes)
    try:
        _write_model(model, temporary)
        _write_tokenizer(path, model, temporary)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():  # else another process was faster
            raise _unwritable(folder.parent, one_line(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _writable(cache: Path, name: str, needed: int) -> Path:
    """A new folder in ``cache``, where there is place for ``needed`` bytes."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=cache))
        free = shutil.disk_usage(cache).free
    except OSError as error:
        raise _unwritable(cache, one_line(error)) from error
    if free < needed:
        temporary.rmdir()
        raise _unwritable(cache, f"{needed:,} bytes needed for the converted weights, {free:,} free")
    return temporary


def _unwritable(cache: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the cache {str(cache)!r} cannot be written: {why}; DUALDECODER_CACHE names another folder")


def _write_model(model: GgufModel, folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file(dict(model.tensors()), folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(model.entries, indent=2), encoding="utf-8")


def _write_tokenizer(path: Path, model: GgufModel, folder: Path) -> None:
    if not model.has_tokenizer:
        return
    try:
        # Through a link in an empty folder: files of another model beside the GGUF would be read as well.
        with tempfile.TemporaryDirectory() as alone:
            link = Path(alone) / "model.gguf"
            link.symlink_to(path.resolve())
            save_tokenizer(link, folder)
    # transformers and tokenizers raise exceptions of many kinds for a vocabulary that they cannot convert.
    except Exception as error:
        if is_unwritable(error):
            raise _unwritable(folder.parent, one_line(error)) from error
        raise CheckpointError(f"{path.name}: its tokenizer is not readable: {one_line(error)}") from error
