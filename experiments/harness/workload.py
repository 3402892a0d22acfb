"""What the experiments run on: engines from a config, and prompts of real text that ships with Python."""

import importlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.progress import track

from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError


def engine_for(model: DictConfig, method: str, options: dict[str, Any] | DictConfig) -> Engine:
    """An engine of the configured model with a method; the weights are read once a process."""
    plain = OmegaConf.to_container(options, resolve=True) if isinstance(options, DictConfig) else options
    return _loaded(model.source, model.dtype).with_method(method, **plain)


@lru_cache(maxsize=1)
def _loaded(source: str, dtype: str) -> Engine:
    return Engine.from_pretrained(source, method="full_kv", dtype=dtype)


@lru_cache(maxsize=1)
def manual_text() -> str:
    """Python's language reference, about 100,000 tokens of technical English (``pydoc_data.topics``, PSF licence)."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def manual_prompt(engine: Engine, tokens: int, offset: int = 0) -> list[int]:
    """``tokens`` token ids of the manual from token ``offset`` on. Raises ConfigError if it is too short."""
    ids = _manual_ids(engine.tokenizer)
    if offset + tokens > len(ids):
        raise ConfigError(f"context={tokens} is not allowed; allowed: at most {len(ids) - offset} tokens of real text")
    return ids[offset : offset + tokens]


@lru_cache(maxsize=1)
def _manual_ids(tokenizer: Any) -> list[int]:
    # verbose=False: the text is longer than the model's context on purpose, it is cut afterwards.
    return tokenizer(manual_text(), verbose=False).input_ids


def progress(items: Iterable[Any], description: str, total: int | None = None) -> Iterable[Any]:
    """Iterate with a progress bar that goes away when it is done."""
    return track(items, description, total=total, transient=True)
