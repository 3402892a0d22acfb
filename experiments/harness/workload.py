"""What the experiments run on: engines from a config, and prompts of real text that ships with Python."""

import importlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.progress import track

from dualdecoder.checkpoints import RANDOM_PREFIX
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError, require

_QUESTION = (
    "\n\nUsing only the manual above, explain to a beginner which statements and expressions it describes, "
    "how they differ, and give a short example of each."
)


def engine_for(model: DictConfig, method: str, options: dict[str, Any] | DictConfig) -> Engine:
    """An engine of the configured model with a method; the weights are read once a process."""
    plain = OmegaConf.to_container(options, resolve=True) if isinstance(options, DictConfig) else options
    return _loaded(model.source, model.dtype).with_method(method, **plain)


def require_positive(cfg: DictConfig, *fields: str) -> None:
    """Raise ConfigError unless the named fields are integers of at least 1."""
    for name in fields:
        require(isinstance(cfg[name], int) and cfg[name] >= 1, name, cfg[name], "a positive integer")


@lru_cache(maxsize=1)
def _loaded(source: str, dtype: str) -> Engine:
    has_text = not source.startswith(RANDOM_PREFIX)
    require(has_text, "model.source", source, "a model with a tokenizer: smollm2, a folder, a GGUF file or a hub id")
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


def question_prompt(engine: Engine, tokens: int) -> list[int]:
    """``tokens`` token ids: the manual and a question about it, in the model's chat template."""
    marker = "\x00"
    template = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{marker}{_QUESTION}"}], tokenize=False, add_generation_prompt=True
    )
    head, tail = (engine.tokenizer(part, add_special_tokens=False).input_ids for part in template.split(marker))
    minimum = len(head) + len(tail) + 1
    require(tokens >= minimum, "context", tokens, f"at least {minimum} tokens for prompt=question")
    return head + manual_prompt(engine, tokens - minimum + 1) + tail


@lru_cache(maxsize=1)
def _manual_ids(tokenizer: Any) -> list[int]:
    # verbose=False: the text is longer than the model's context on purpose, it is cut afterwards.
    return tokenizer(manual_text(), verbose=False).input_ids


def progress(items: Iterable[Any], description: str, total: int | None = None) -> Iterable[Any]:
    """Iterate with a progress bar that goes away when it is done."""
    return track(items, description, total=total, transient=True)
