"""What a point is called, by its settings and by the command that measures it, and what started it."""

import re
import shlex
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from experiments.harness.portable import portable

# They say where results go and how a sweep is driven, never what is measured.
OUTPUT_KEYS = ("results_dir", "dry_run", "retry_failed", "fresh_process")
_SLUG_KEYS = ("model", "method", "speculation", "task", "prompt", "context", "length", "batch", "budget")


def in_sweep() -> bool:
    """True inside one job of a Hydra multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def launcher_words() -> str:
    """What started this point, and how many it may run at once: others on the same host can slow a measurement."""
    if not HydraConfig.initialized():
        return "none"
    launcher = HydraConfig.get().launcher
    name = launcher["_target_"].rpartition(".")[2]
    at_once = 1 if name == "BasicLauncher" or not in_sweep() else launcher.get("n_jobs", "an unknown number")
    return f"{name}, {at_once} at once"


def slug(config: dict[str, Any]) -> str:
    """The settings that tell points apart, as a part of a file's name."""
    values = [config[key] for key in _SLUG_KEYS if config.get(key) is not None]
    words = [str(value.get("name", "")) if isinstance(value, dict) else str(value) for value in values]
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words)).strip("-.")[:80] or "point"


def command_line(experiment: str) -> str:
    """The line that measures this point alone, also when it ran as one job of a sweep."""
    parts = ["python", "-m", f"experiments.{experiment}"]
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        if hydra.job.config_name not in (None, experiment):
            parts += ["--config-name", hydra.job.config_name]
        # As they were written: one may refer to another setting.
        given = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        assert isinstance(given, list)
        parts += [item for item in map(str, given) if item.lstrip("+~").partition("=")[0] not in OUTPUT_KEYS]
    return portable(shlex.join(parts))
