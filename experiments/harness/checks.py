"""Settings that are wrong are found before a process is started and weights are read: each raises ConfigError.

`measure` calls the same checks, for whoever calls it without `run_point`.
"""

import math
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dualdecoder.checkpoints import RANDOM_PREFIX
from dualdecoder.config import ChunkConfig, MethodConfig, ModelConfig, dtype_from_name
from dualdecoder.errors import require
from dualdecoder.method import method_class, method_config
from experiments.harness.environment import visible_gpus
from experiments.harness.model_names import shape_in


def is_integer(value: Any, least: int) -> bool:
    """Whether ``value`` is an integer of at least ``least``; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_positive(cfg: DictConfig, *fields: str) -> None:
    """The named fields are integers of at least 1."""
    for name in fields:
        require(is_integer(cfg[name], 1), name, plain(cfg[name]), "a positive integer")


def require_natural(cfg: DictConfig, *fields: str) -> None:
    """The named fields are integers of at least 0."""
    for name in fields:
        require(is_integer(cfg[name], 0), name, plain(cfg[name]), "0 or a positive integer")


def require_shares(cfg: DictConfig, *fields: str) -> None:
    """The named fields are numbers from 0 to 1."""
    for name in fields:
        require(is_number(cfg[name]) and 0 <= cfg[name] <= 1, name, plain(cfg[name]), "a share from 0 to 1")


def require_list(cfg: DictConfig, field: str, accepts: Callable[[Any], bool], allowed: str) -> None:
    """The named field is a list of one or more values that ``accepts`` takes; ``allowed`` says so."""
    given = plain(cfg[field])
    require(isinstance(given, list) and given != [] and all(map(accepts, given)), field, given, allowed)


def require_positive_list(cfg: DictConfig, field: str) -> None:
    """The named field is a list of one or more positive integers."""
    require_list(cfg, field, lambda value: is_integer(value, 1), "one or more positive integers, such as [1,8]")


def require_names(cfg: DictConfig, field: str, of: str) -> None:
    """The named field is a list of one or more names."""
    require_list(cfg, field, lambda value: isinstance(value, str) and value != "", f"one or more names of {of}, in []")


def require_gpu() -> None:
    """There is an NVIDIA GPU, and a PyTorch that can use one. Starts no CUDA context."""
    require(bool(visible_gpus()), "hardware", "no GPU", "a machine with an NVIDIA GPU")


def check_model(cfg: DictConfig, dtype: Any = None) -> ModelConfig:
    """The config's model is known and its dtype allowed; returns its shape."""
    dtype_from_name(dtype or cfg.model.dtype)
    return shape_in(cfg.model)


def check_text_model(cfg: DictConfig, dtype: Any = None) -> ModelConfig:
    """The same of a model that reads text."""
    source = cfg.model.source
    words = "a model with a tokenizer: smollm2, a folder, a GGUF file or a hub id"
    require(not str(source).startswith(RANDOM_PREFIX), "model.source", source, words)
    return check_model(cfg, dtype)


def check_context(cfg: DictConfig, shape: ModelConfig, field: str, more: int = 0) -> None:
    """The tokens in the named field, and as many more, are within the model's context."""
    most = shape.max_context - more
    words = f"at most {most} tokens, the context of {cfg.model.name}" + (f" less {more} that follow" if more else "")
    require(cfg[field] <= most, field, cfg[field], words)


def check_device(device: Any) -> None:
    """``device`` is cpu, or cuda on a machine that has it."""
    kind = str(device).partition(":")[0]
    require(kind in ("cpu", "cuda"), "device", device, "cpu, cuda")
    require(kind == "cpu" or bool(visible_gpus()), "device", device, "cpu: this machine has no NVIDIA GPU")


def check_method(method: DictConfig, device: str, options: Any = None) -> MethodConfig:
    """A method's name, options (``options`` replaces its own) and device are allowed; returns its settings."""
    require(isinstance(method.name, str), "method", method.name, "the name of a method")
    kinds, kind = method_class(method.name).devices, device.partition(":")[0]
    require(kind in kinds, "device", device, f"{', '.join(kinds)} (method {method.name})")
    return method_config(method.name, plain(method.options) if options is None else options)


def check_methods(cfg: DictConfig, device: str) -> None:
    """The config's ``methods``, names and options of each, are one or more, and each is allowed."""
    require(len(cfg.methods) > 0, "methods", [], "one or more names of methods")
    for method in cfg.methods.values():
        check_method(method, device)


def check_synthetic(cfg: DictConfig, config: ChunkConfig, decoded: int, sets: int = 0) -> None:
    """The context has room for ``decoded`` tokens behind a made-up past of one chunk, or of ``sets`` selections."""
    least = decoded + config.local + max(config.chunk, sets * config.budget)
    require(cfg.context >= least, "context", cfg.context, f"at least {least} tokens, of which {decoded} are decoded")


def plain(value: Any) -> Any:
    """A value out of a config without OmegaConf's containers."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
