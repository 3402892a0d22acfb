"""What an engine's answers depend on, as one text: answers that are kept are found by it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch

from dualdecoder.engine import Engine
from dualdecoder.model import Decoder
from experiments.harness.environment import code_hash
from experiments.harness.sources import method_sources

# What turns texts into tokens, and tokens into numbers.
_PACKAGES = ("lm_eval", "tokenizers", "torch", "transformers", "triton")
# Bytes of a weight that are copied to the host at once.
_PIECE_BYTES = 2**26
_DIGESTS: dict[int, tuple[object, str | None, str]] = {}


def answers_identity(engine: Engine, weights: str | None = None) -> str:
    """Everything but the request itself: model, tokenizer, stop tokens, number format, device, method, code, packages.

    Args:
        engine: whose answers are kept.
        weights: what identifies its model, for example ``weights_id`` of where it was loaded from. None: a digest of
            its weights themselves, which reads all of them (16 GB in about half a minute).
    """
    model = engine.model
    parts = {
        "weights": weights or weights_digest(model),
        # The name says where a model lies, which decides nothing.
        "shape": repr(replace(model.config, name="")),
        "tokenizer": tokenizer_digest(engine.tokenizer),
        "stop_ids": sorted(engine.stop_ids),
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        "method": [engine.method_name, repr(engine.config), method_sources({"method": engine.method_name})],
        "code": code_hash(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    return json.dumps(parts, sort_keys=True)


def weights_digest(model: Decoder) -> str:
    """SHA-256 over all weights of a model as they lie in memory, with their names and shapes."""
    digest = hashlib.sha256()
    for name, tensor in _weights(model):
        digest.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\n".encode())
        for piece in tensor.detach().reshape(-1).view(torch.uint8).split(_PIECE_BYTES):
            digest.update(piece.cpu().numpy())
    return f"sha256:{digest.hexdigest()}"


def _weights(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    yield "embedding", model.embedding_VE
    for number, layer in enumerate(model.layers):
        yield from ((f"{number}.{name}", tensor) for name, tensor in vars(layer).items() if tensor is not None)
    yield "final_norm", model.final_norm_E
    if model.unembedding_VE is not model.embedding_VE:
        yield "unembedding", model.unembedding_VE


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of what a tokenizer does to a text, its chat template included."""
    known = _DIGESTS.get(id(tokenizer))
    # The object is kept beside its digest, so that no other one can get its id.
    if known is None or known[1] != tokenizer.chat_template:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
        digest = hashlib.sha256(f"{rules}\0{tokenizer.chat_template}".encode()).hexdigest()
        known = _DIGESTS[id(tokenizer)] = (tokenizer, tokenizer.chat_template, digest)
    return known[2]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
