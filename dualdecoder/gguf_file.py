"""A GGUF file, split or not, as a config and tensors under transformers' names; what is not understood is refused.

Sources: the GGUF specification (ggml/docs/gguf.md), and llama.cpp for what a key means and what its absence means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dualdecoder.config import ModelConfig
from dualdecoder.config_file import model_config
from dualdecoder.decoder_weights import EMBEDDING, FINAL_NORM, HEAD, require_tensors, tensor_shapes
from dualdecoder.errors import CheckpointError, one_line, shortened
from dualdecoder.gguf_metadata import config_entries

ROPE_FACTORS = "rope_freqs.weight"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ENDS = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GgufModel:
    """entries: those of the config.json it amounts to. has_tokenizer: whether there are tokens in it."""

    entries: dict[str, Any]
    config: ModelConfig
    has_tokenizer: bool
    stored: dict[str, Any]
    llama_rows: bool

    @property
    def float32_bytes(self) -> int:
        """Bytes of all tensors, dequantised."""
        return sum(4 * int(tensor.n_elements) for tensor in self.stored.values())

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor under transformers' name and in its layout, dequantised to float32."""
        from gguf import dequantize

        for name, tensor in self.stored.items():
            weight = dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
            if self.llama_rows and name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = _half_split(weight, self.config.head_dim)
            yield name, np.ascontiguousarray(weight, dtype=np.float32)


def gguf_parts(path: Path) -> list[Path]:
    """The files of a model whose first file is ``path``; raises ``CheckpointError`` naming the part that is missing."""
    match = _SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    parts = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if number != 1:
        raise CheckpointError(f"model={str(path)!r} is part {number} of {count}; give the first, {stem}-00001-of-...")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"model={str(path)!r} is part 1 of {count}; missing: {', '.join(missing[:3])}")
    return parts


def read_gguf(path: Path) -> GgufModel:
    """Read names, shapes and metadata of the model whose first file is ``path``; no weight is read yet.

    Raises ``CheckpointError`` for what cannot be read, is missing or is left over, and ``ConfigError`` for metadata.
    """
    readers = [_open(part) for part in gguf_parts(path)]
    fields = _metadata(readers[0], path)
    _check_split(readers, path)
    stored = _by_name(readers, path)
    factors = stored.pop(ROPE_FACTORS, None)
    if EMBEDDING not in stored:
        raise CheckpointError(f"{path.name}: tensor 'token_embd.weight' is missing")
    rows, plain = _shape(stored[EMBEDDING])[0], None if factors is None else _plain(factors)
    entries = config_entries(fields, path.name, rows, HEAD not in stored, plain)
    config = model_config(entries, path.name, path.stem)
    needed = tensor_shapes(config, not config.tied_embeddings)
    require_tensors(path.name, needed, stored, lambda name: _shape(stored[name]))
    for name, tensor in stored.items():
        _require_known_type(path, name, tensor)
    architecture = fields["general.architecture"]
    return GgufModel(entries, config, "tokenizer.ggml.tokens" in readers[0].fields, stored, architecture == "llama")


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    # Whatever its parser stumbles over in a file that is cut or is something else.
    except Exception as error:
        raise CheckpointError(f"model={str(path)!r}: not a readable GGUF file: {one_line(error)}") from error
    if reader.byte_order == "S":  # the library swaps plain numbers only, not the scales inside quantised blocks
        raise CheckpointError(f"model={str(path)!r}: its bytes are in the other order than this machine's")
    return reader


def _metadata(reader: Any, path: Path) -> dict[str, Any]:
    """Values of all keys but the tokenizer's tables."""
    long = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
    try:
        return {name: field.contents() for name, field in reader.fields.items() if name not in long}
    except Exception as error:
        raise CheckpointError(f"model={str(path)!r}: metadata is not readable: {one_line(error)}") from error


def _check_split(readers: list[Any], path: Path) -> None:
    for number, reader in enumerate(readers):
        no, count = _scalar(reader, "split.no", 0), _scalar(reader, "split.count", 1)
        if (no, count) != (number, len(readers)):
            said = f"part {shortened(repr(no), 20)} of {shortened(repr(count), 20)}, counted from 0"
            raise CheckpointError(f"{path.name}: part {number} of {len(readers)} by its name is {said}, by its content")
    total = sum(len(reader.tensors) for reader in readers)
    stated = _scalar(readers[0], "split.tensors.count", total)
    if stated != total:
        raise CheckpointError(f"{path.name}: split.tensors.count={stated!r}, and the files hold {total} tensors")


def _scalar(reader: Any, key: str, default: Any) -> Any:
    return reader.fields[key].contents() if key in reader.fields else default


def _by_name(readers: list[Any], path: Path) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        name = _transformers_name(tensor.name)
        if name is None:
            raise CheckpointError(f"{path.name}: tensor {shortened(repr(tensor.name))} is not one that we read")
        if name in stored:
            raise CheckpointError(f"{path.name}: tensor {tensor.name!r} is stored twice")
        stored[name] = tensor
    return stored


def _transformers_name(name: str) -> str | None:
    if name == ROPE_FACTORS:
        return name
    match = _BLOCK.fullmatch(name)
    if not match:
        return _ENDS.get(name)
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}" if part in _PARTS else None


def _require_known_type(path: Path, name: str, tensor: Any) -> None:
    from gguf import dequantize

    try:
        dequantize(tensor.data[:1] if tensor.data.ndim > 1 else tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise CheckpointError(f"{path.name}: weight {name!r} is of type {kind}, which is not read") from error


def _plain(tensor: Any) -> list[float]:
    return [float(value) for value in tensor.data]


def _shape(tensor: Any) -> tuple[int, ...]:
    """Rows first, as numpy and torch have it; GGUF lists the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _half_split(weight: np.ndarray, head_dim: int) -> np.ndarray:
    # llama.cpp's llama pairs neighbouring rows of a head; transformers pairs a head's first half with its second.
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
