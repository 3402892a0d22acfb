"""What the experiments run on: engines from a config, and prompts of real text that ships with Python."""

import copy
import importlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.progress import track

from dualdecoder.checkpoints import RANDOM_PREFIX, weights_id
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError, require
from dualdecoder.prompts import chat_text
from experiments.harness.environment import ROOT
from experiments.harness.memory import keep_last

_QUESTION = (
    "\n\nUsing only the manual above, explain to a beginner which statements and expressions it describes, "
    "how they differ, and give a short example of each."
)


def engine_for(
    model: DictConfig,
    method: str,
    options: dict[str, Any] | DictConfig,
    device: str = "cpu",
    dtype: str | None = None,
) -> Engine:
    """An engine of the configured model with a method; the weights are read once a process.

    ``dtype``: instead of the model's own.
    """
    plain = OmegaConf.to_container(options, resolve=True) if isinstance(options, DictConfig) else options
    return _loaded(model.source, dtype or model.dtype, device).with_method(method, **plain)


def with_methods(cfg: DictConfig) -> DictConfig:
    """``cfg`` with its list ``methods`` of names turned into name and options of each, from ``conf/method``.

    Options may refer to fields of ``cfg``, such as ``${budget}``. A name without a file there is taken as it is (a
    dotted path, say) with its default options. One ``method``, which is a group of its own, takes the place of the
    list. A config whose methods are looked up already comes back unchanged.
    Raises ConfigError for methods that are no list.
    """
    if one := cfg.get("method"):
        chosen = with_value(cfg, "methods", {one.name: one})
        del chosen.method
        return chosen
    if OmegaConf.is_dict(cfg.methods):
        return cfg
    require(cfg.methods == [] or OmegaConf.is_list(cfg.methods), "methods", cfg.methods, "a list: methods=[full_kv]")
    files = {name: ROOT / "conf" / "method" / f"{name}.yaml" for name in cfg.methods}
    plain = {name: {"name": name, "options": {}} for name in files}
    found = {name: OmegaConf.load(path) if path.is_file() else plain[name] for name, path in files.items()}
    return with_value(cfg, "methods", found)


def method_setting(cfg: DictConfig) -> dict[str, Any]:
    """The group ``method`` as a plain dict; ``label`` is what tables call it, which a second setting of a method has.

    Plain, for asked for a key it lacks, OmegaConf raises and keeps the caller's locals, a method's memory among them.
    """
    setting = OmegaConf.to_container(cfg.method, resolve=True)
    return {"label": setting["name"], **setting}


def with_value(cfg: DictConfig, field: str, value: Any) -> DictConfig:
    """A copy of ``cfg`` with another value in a field; what refers to the field follows it."""
    changed = copy.deepcopy(cfg)
    OmegaConf.set_struct(changed, False)
    changed[field] = value
    return changed


@keep_last(key=lambda source, dtype, device: (weights_id(source), dtype, device))
def _loaded(source: str, dtype: str, device: str) -> Engine:
    has_text = not source.startswith(RANDOM_PREFIX)
    require(has_text, "model.source", source, "a model with a tokenizer: smollm2, a folder, a GGUF file or a hub id")
    return Engine.from_pretrained(source, dtype=dtype, device=device)


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
    messages = [{"role": "user", "content": f"{marker}{_QUESTION}"}]
    template = chat_text(engine.tokenizer, messages, add_generation_prompt=True)
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
