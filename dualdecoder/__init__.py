"""DualDecoder: sparse-KV decoding with two tokens a step, the second one for prefetching (arXiv 2607.26475).

Public names are imported on use, so that ``import dualdecoder`` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Engine": "dualdecoder.engine",
    "Completion": "dualdecoder.completions",
    "TokenEvent": "dualdecoder.completions",
    "plan_memory": "dualdecoder.planning",
    "load_model": "dualdecoder.checkpoints",
    "load_tokenizer": "dualdecoder.checkpoints",
    "weights_id": "dualdecoder.checkpoints",
    "SamplingConfig": "dualdecoder.config",
    "DualDecoderConfig": "dualdecoder.config",
    "KVMethod": "dualdecoder.method",
    "UserError": "dualdecoder.errors",
    "ConfigError": "dualdecoder.errors",
    "CheckpointError": "dualdecoder.errors",
    "CapacityError": "dualdecoder.errors",
    "NotFiniteError": "dualdecoder.errors",
    "ContextError": "dualdecoder.errors",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
