"""Run a point once: the record is there before the measurement, and a finished one is never touched again."""

import hashlib
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.harness.budgets import register_resolvers
from experiments.harness.child import Measure
from experiments.harness.environment import ROOT, device_tag, environment, visible_gpus
from experiments.harness.estimate import estimate
from experiments.harness.isolate import Outcome, measure_here, measure_in_child
from experiments.harness.own_methods import register_own_methods
from experiments.harness.records import FAILURES, SCHEMA, Record, RecordError, read_record, write_record

# They say where results go and how a sweep is driven, never what is measured.
OUTPUT_KEYS = ("results_dir", "dry_run", "retry_failed", "fresh_process")
_SLUG_KEYS = ("model", "method", "speculation", "task", "prompt", "context", "length", "batch", "budget")

Run = Callable[[Measure, dict[str, Any]], Outcome]
# For conf/hydra/launcher/gpus.yaml: as many points at once as there are GPUs.
register_resolvers()
register_own_methods()
OmegaConf.register_new_resolver("gpus", lambda: max(1, len(visible_gpus())), replace=True)


class PointFailed(RuntimeError):
    """A point has no result: it failed now, or it did before and no new try was asked for."""


def run_point(experiment: str, cfg: DictConfig, measure: Measure, run: Run | None = None) -> Path | None:
    """Measure the point that `cfg` describes, unless it is recorded already; returns the path of its record.

    The identity of a point is the experiment, the resolved config without the output keys, the code and the device.
    `measure`, a function at the top of a file, returns tidy rows; it runs in a fresh child process on one GPU, or with
    ``fresh_process=false`` in this one, which the record says. A failed point keeps its failure as a record, is tried
    again only with ``retry_failed=true``, and makes the run or the sweep end with status 1 after all other points; an
    interrupt leaves the record "running", to be replaced by the next run.
    With ``dry_run=true`` the point is only printed, with estimates of its time and memory, and None is returned.
    """
    config = recorded_config(cfg)
    fresh = cfg.get("fresh_process", True)
    run = run or (measure_in_child if fresh else measure_here)
    record = _new_record(experiment, config, fresh)
    path = results_folder(cfg.results_dir) / experiment / f"{_slug(config)}-{record.point}.json"
    before = _finished(path)
    skipped = before is not None and not (before.status in FAILURES and cfg.get("retry_failed", False))
    if cfg.get("dry_run", False):
        state = f"recorded, {before.status}" if before and skipped else "to do"
        print(f"{state}: {record.command}: {estimate(record, path.parent)}")
        return None
    if not skipped:
        write_record(path, record)
        before = _measure(path, record, cfg, run, measure)
    elif before and before.status == "ok":
        print(f"already recorded: {_portable(str(path))}")
    assert before is not None
    if before.status in FAILURES:
        _fail(before, path, known=skipped)
    return path


def _measure(path: Path, record: Record, cfg: DictConfig, run: Run, measure: Measure) -> Record:
    begin = time.perf_counter()
    # The child gets the config as written: with the real paths of this machine, which the record leaves out, and with
    # its references, because an experiment may replace a value that others refer to.
    outcome = run(measure, _plain(cfg, resolve=False))
    if outcome.gpu:
        record = replace(record, environment={**record.environment, "gpu": [outcome.gpu]})
    ended = replace(record, finished=_now(), seconds=time.perf_counter() - begin)
    try:
        return _save(path, _with_result(ended, outcome))
    except ValueError as error:
        # Rows that are not what the experiment promises: the failure is recorded instead of them.
        return _save(path, _with_result(ended, Outcome(error={"type": type(error).__name__, "message": str(error)})))


def _with_result(record: Record, outcome: Outcome) -> Record:
    if outcome.error is None:
        return replace(record, status="ok", rows=outcome.rows)
    status = "out_of_memory" if outcome.error.get("kind") == "memory" else "failed"
    error = {"traceback": "", **outcome.error}
    texts = {key: _portable(_short_paths(value)) if isinstance(value, str) else value for key, value in error.items()}
    return replace(record, status=status, error=texts)


def _fail(record: Record, path: Path, known: bool) -> None:
    """Raise in a sweep, so that the other points go on; otherwise end the process with one line."""
    assert record.error is not None
    text = f"{record.error['message'] or record.error['type']}"
    if known:
        text += f" (recorded before in {path.name}; retry_failed=true tries again)"
    if in_sweep():
        print(f"{record.status}: {record.command}: {text}")
        raise PointFailed(f"{record.command}: {text}")
    sys.exit(f"error: {text}")


def in_sweep() -> bool:
    """True inside one job of a Hydra multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def results_folder(results_dir: str) -> Path:
    """The folder that `results_dir` means: relative to the root of the repository, or absolute."""
    return ROOT / results_dir


def recorded_config(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config as plain values, without the keys that change no measurement and without folders."""
    kept = {key: value for key, value in _plain(cfg).items() if key not in OUTPUT_KEYS}
    return json.loads(_portable(json.dumps(kept)))


def _plain(cfg: DictConfig, resolve: bool = True) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=resolve, throw_on_missing=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _new_record(experiment: str, config: dict[str, Any], fresh: bool) -> Record:
    env = {**environment(), "launcher": _launcher() + ("" if fresh else ", points in one process")}
    identity = json.dumps([SCHEMA, experiment, config, env["code"], device_tag(env)], sort_keys=True)
    point = hashlib.sha256(identity.encode()).hexdigest()[:10]
    return Record(experiment, point, config, env, command=_command(experiment), started=_now())


def _launcher() -> str:
    """What started this point, and how many it may run at once: others on the same host can slow a measurement."""
    if not HydraConfig.initialized():
        return "none"
    launcher = HydraConfig.get().launcher
    name = launcher["_target_"].rpartition(".")[2]
    at_once = 1 if name == "BasicLauncher" or not in_sweep() else launcher.get("n_jobs", "an unknown number")
    return f"{name}, {at_once} at once"


def _save(path: Path, record: Record) -> Record:
    # Another process may have finished the same point meanwhile: the first result stays.
    other = _finished(path)
    if other is not None and other.status == "ok":
        return other
    write_record(path, record)
    return record


def _finished(path: Path) -> Record | None:
    """The record in `path` if there is one whose point has ended, well or badly."""
    try:
        record = read_record(path) if path.exists() else None
    except RecordError:
        return None
    return record if record and record.status != "running" else None


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


def _short_paths(text: str) -> str:
    return re.sub(r'File "(/[^"]+)"', lambda match: f'File "{_short_path(match[1])}"', text)


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
