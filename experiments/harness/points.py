"""Run a point once: the record is there before the measurement, and a finished one is never touched again."""

import hashlib
import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dualdecoder.errors import UserError
from experiments.harness.environment import ROOT, device_tag, environment
from experiments.harness.records import SCHEMA, Record, RecordError, read_record, write_record

OUTPUT_KEYS = ("results_dir",)
_SLUG_KEYS = ("model", "method", "speculation", "task", "prompt", "context", "length", "batch", "budget")


def run_point(experiment: str, cfg: DictConfig, measure: Callable[[DictConfig], list[dict[str, Any]]]) -> Path:
    """Measure the point that `cfg` describes, unless it is recorded already; returns the path of its record.

    The identity of a point is the experiment, the resolved config without the output keys, the code and the device.
    `measure` returns tidy rows. What it raises is recorded and raised again; an interrupt leaves the record "running",
    and a record that is "running" or "failed" is replaced by the next run. A user's error outside a sweep ends the
    process with one line and status 1; in a sweep it is raised like any other, so that the other points go on.
    """
    record = _new_record(experiment, cfg)
    path = results_folder(cfg.results_dir) / experiment / f"{_slug(record.config)}-{record.point}.json"
    if _is_finished(path):
        print(f"already recorded: {_portable(str(path))}")
        return path
    write_record(path, record)
    begin = time.perf_counter()
    try:
        rows = measure(cfg)
        _save(path, _end(record, begin, status="ok", rows=rows))
    except Exception as error:
        _save(path, _end(record, begin, status="failed", error=_describe(error)))
        if isinstance(error, UserError) and not in_sweep():
            sys.exit(f"error: {error}")
        raise
    return path


def in_sweep() -> bool:
    """True inside one job of a Hydra multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def results_folder(results_dir: str) -> Path:
    """The folder that `results_dir` means: relative to the root of the repository, or absolute."""
    return ROOT / results_dir


def recorded_config(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config as plain values, without the keys that only say where results go."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True, enum_to_str=True)
    assert isinstance(plain, dict)
    kept = {key: value for key, value in plain.items() if key not in OUTPUT_KEYS}
    return json.loads(_portable(json.dumps(kept)))


def _new_record(experiment: str, cfg: DictConfig) -> Record:
    config, env = recorded_config(cfg), environment()
    identity = json.dumps([SCHEMA, experiment, config, env["code"], device_tag(env)], sort_keys=True)
    point = hashlib.sha256(identity.encode()).hexdigest()[:10]
    return Record(experiment, point, config, env, command=_command(experiment), started=_now())


def _end(record: Record, begin: float, **changes: Any) -> Record:
    return replace(record, finished=_now(), seconds=time.perf_counter() - begin, **changes)


def _save(path: Path, record: Record) -> None:
    # Another process may have finished the same point meanwhile: the first finished record stays.
    if not _is_finished(path):
        write_record(path, record)


def _is_finished(path: Path) -> bool:
    try:
        return path.exists() and read_record(path).status == "ok"
    except RecordError:
        return False


def _slug(config: dict[str, Any]) -> str:
    values = [config[key] for key in _SLUG_KEYS if config.get(key) is not None]
    words = [str(value.get("name", "")) if isinstance(value, dict) else str(value) for value in values]
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words)).strip("-.")[:80] or "point"


def _command(experiment: str) -> str:
    """The line that measures this point alone, also when it ran as one job of a sweep."""
    parts = ["python", "-m", f"experiments.{experiment}"]
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        if hydra.job.config_name not in (None, experiment):
            parts += ["--config-name", hydra.job.config_name]
        parts += [item for item in hydra.overrides.task if item.lstrip("+~").partition("=")[0] not in OUTPUT_KEYS]
    return _portable(shlex.join(parts))


def _describe(error: Exception) -> dict[str, str]:
    lines = "".join(traceback.format_exception(error))
    lines = re.sub(r'File "(/[^"]+)"', lambda match: f'File "{_short_path(match[1])}"', lines)
    return {"type": type(error).__name__, "message": _portable(str(error)), "traceback": _portable(lines)}


def _short_path(path: str) -> str:
    """Relative to the repository, or from the installed package on, or the file's name alone."""
    if "/site-packages/" not in path and Path(path).is_relative_to(ROOT):
        return Path(path).relative_to(ROOT).as_posix()
    found = re.search(r"/(?:site-packages|lib/python3\.\d+)/(.+)", path)
    return found[1] if found else Path(path).name


def _portable(text: str) -> str:
    """`text` without the folders of this machine that name a user or a checkout."""
    # The guards on both sides leave longer names alone: /root is not the start of /rootfs, nor the end of /mnt/root.
    for folder, name in ((str(ROOT), "."), (str(Path.home()), "~")):
        if folder != "/":
            text = re.sub(rf"(?<![\w.-]){re.escape(folder)}(?![\w.-])", name, text)
    return text


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
