"""Run a point once: the record is there before the measurement, and a finished one is never touched again."""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dualdecoder.errors import ConfigError, UserError, require
from experiments.harness import budgets, model_names
from experiments.harness.child import Measure
from experiments.harness.environment import ROOT, device_tag, environment, visible_gpus
from experiments.harness.estimate import estimate
from experiments.harness.isolate import Outcome, measure_here, measure_in_child
from experiments.harness.jobs import OUTPUT_KEYS, command_line, in_sweep, launcher_words, slug
from experiments.harness.own_methods import register_own_methods
from experiments.harness.portable import one_line, portable, portable_error
from experiments.harness.records import FAILURES, SCHEMA, Record, RecordError, read_record, write_record
from experiments.harness.saving import keep_rows, next_number, only_one, probe, save_measured, save_started
from experiments.harness.sources import checkpoint_content, method_sources
from experiments.harness.tokens import with_token_counts

Run = Callable[[Measure, dict[str, Any]], Outcome]
Check = Callable[[DictConfig], None]
# For conf/hydra/launcher/gpus.yaml: as many points at once as there are GPUs.
budgets.register_resolvers()
model_names.register_resolvers()
register_own_methods()
OmegaConf.register_new_resolver("gpus", lambda: max(1, len(visible_gpus())), replace=True)


class PointFailed(CompactHydraException):
    """A point has no result: its settings are wrong, it failed now, or it did before. Hydra prints it as one line."""


@dataclass(frozen=True)
class _Point:
    """What is to be measured and how, and the record that says so; `path` is the record's."""

    cfg: DictConfig
    measure: Measure
    run: Run
    record: Record
    path: Path

    @property
    def slug(self) -> str:
        return slug(self.record.config)

    def done(self, before: Record | None) -> bool:
        """Whether the record found at `path` is all that is asked for."""
        return before is not None and not (before.status in FAILURES and self.cfg.get("retry_failed", False))


def run_point(
    experiment: str,
    cfg: DictConfig,
    measure: Measure,
    run: Run | None = None,
    *,
    prepare: Callable[[DictConfig], DictConfig] = lambda cfg: cfg,
    check: Check = lambda cfg: None,
    weights: bool = True,
) -> Path | None:
    """Measure the point that `cfg` describes, unless it is recorded already; returns the path of its record.

    The identity of a point is the experiment, the resolved config without the output keys, the code, the device, and
    the content of the model's checkpoint (unless ``weights`` is False: not read) and of methods from elsewhere.
    `measure`, a function at the top of a file, returns tidy rows; it runs in a fresh child process on one GPU, or with
    ``fresh_process=false`` in this one, which the record says. A failed point keeps its failure as a record, is tried
    again only with ``retry_failed=true``, and makes the run or the sweep end with status 1 after all other points; an
    interrupt leaves the record "running", to be replaced by the next run.
    What a user got wrong is no result: it is said in one line, ends the run or the sweep with status 1, and is not
    recorded. ``check`` is to find it, by raising UserError, before a process is started and weights are read.
    ``prepare`` makes the config that all this is about out of the one from the command line.
    With ``dry_run=true`` the point is only printed, with estimates of its time and memory, and None is returned.
    """

    def point() -> _Point:
        check(cfg)
        record = _new_record(experiment, cfg, weights)
        path = _folder(cfg, experiment) / f"{slug(record.config)}-{record.point}.json"
        in_process = measure_in_child if cfg.get("fresh_process", True) else measure_here
        return _Point(cfg, measure, run or in_process, record, path)

    try:
        cfg = prepare(with_token_counts(cfg))
        recorded_config(cfg)
        if not cfg.get("dry_run", False):
            return _ensure(point())
        _show(command_line(experiment), point)
        return None
    except (UserError, OmegaConfBaseException) as error:
        _refuse(experiment, error)


def _ensure(point: _Point) -> Path:
    before = _finished(point.path)
    if point.done(before):
        return _known(point, before)
    probe(point.path.parent)
    with only_one(point.path, lambda: print(f"waiting: another process measures {point.path.name}", flush=True)):
        now = _finished(point.path)
        # Another process has measured it meanwhile, perhaps again without success.
        if point.done(now) or now != before:
            return _known(point, now)
        ended = _measure(point, before)
    if ended.status in FAILURES:
        _fail(ended, point.path, known=False)
    return point.path


def _known(point: _Point, before: Record | None) -> Path:
    assert before is not None
    if before.status in FAILURES:
        _fail(before, point.path, known=True)
    print(f"already recorded: {portable(str(point.path))}")
    return point.path


def _measure(point: _Point, before: Record | None) -> Record:
    path, record = point.path, replace(point.record, number=next_number(point.path.parent, point.slug))
    save_started(path, record)
    begin = time.perf_counter()
    # The child gets the config as written: with the real paths of this machine, which the record leaves out, and with
    # its references, because an experiment may replace a value that others refer to.
    try:
        outcome = point.run(point.measure, _plain(point.cfg, resolve=False))
    except UserError:
        _forget(path, before)
        raise
    if outcome.error is not None and outcome.error.get("kind") == "user":
        _forget(path, before)
        raise ConfigError(outcome.error["message"])
    if outcome.gpu:
        record = replace(record, environment={**record.environment, "gpu": [outcome.gpu]})
    ended = replace(record, finished=_now(), seconds=time.perf_counter() - begin)
    return _save(path, ended, outcome)


def _forget(path: Path, before: Record | None) -> None:
    """Put back what was there before a measurement that has no result; a disk that refuses keeps it "running"."""
    with suppress(OSError):
        if before is None:
            path.unlink(missing_ok=True)
        else:
            write_record(path, before)


def _save(path: Path, ended: Record, outcome: Outcome) -> Record:
    # On a file system without locks another process may have finished the same point: the first result stays.
    other = _finished(path)
    if other is not None and other.status == "ok":
        return other
    record = _with_result(ended, outcome)
    try:
        save_measured(path, record)
    except UserError:
        raise
    except ValueError as error:
        # Rows that are not what the experiment promises: a failure, and the rows are for whoever can mend them.
        print(f"rows that cannot be recorded: {keep_rows(path.name, outcome.rows)}", flush=True)
        record = _with_result(ended, Outcome(error={"type": type(error).__name__, "message": str(error)}))
        save_measured(path, record)
    return record


def _with_result(record: Record, outcome: Outcome) -> Record:
    if outcome.error is None:
        return replace(record, status="ok", rows=outcome.rows)
    status = "out_of_memory" if outcome.error.get("kind") == "memory" else "failed"
    return replace(record, status=status, error=portable_error({"traceback": "", **outcome.error}))


def _fail(record: Record, path: Path, known: bool) -> NoReturn:
    """Raise in a sweep, so that the other points go on; otherwise end the process with one line."""
    assert record.error is not None
    text = f"{record.error['message'] or record.error['type']}"
    if known:
        text += f" (recorded before in {path.name}; retry_failed=true tries again)"
    _end(record.status, record.command, text)


def _refuse(experiment: str, error: Exception) -> NoReturn:
    """A user's error: OmegaConf says the same on several lines, of which the first is the message."""
    field = getattr(error, "full_key", None)
    text = f"{field}: {str(error).splitlines()[0]}" if field else one_line(error)
    _end("error", command_line(experiment), text)


def _end(status: str, command: str, text: str) -> NoReturn:
    if in_sweep():
        print(f"{status}: {command}: {text}", flush=True)
        # Without the error that led here: Hydra would print it as well.
        raise PointFailed(f"{command}: {text}") from None
    sys.exit(f"error: {text}")


def _show(command: str, make: Callable[[], _Point]) -> None:
    """One line about a point that is not measured now."""
    state = "to do"
    try:
        point = make()
        before = _finished(point.path)
        if before is not None and point.done(before):
            state = f"recorded, {before.status}"
        words = estimate(point.record, point.path.parent)
    except UserError as error:
        words = f"cannot be measured: {one_line(error)}"
    print(f"{state}: {command}: {words}")


def results_folder(results_dir: str) -> Path:
    """The folder that `results_dir` means: relative to the root of the repository, or absolute."""
    return ROOT / results_dir


def _folder(cfg: DictConfig, experiment: str) -> Path:
    given = cfg.results_dir
    require(isinstance(given, str) and given.strip() != "", "results_dir", given, "a folder")
    return results_folder(given) / experiment


def recorded_config(cfg: DictConfig) -> dict[str, Any]:
    """The resolved config as plain values, without the keys that change no measurement and without folders."""
    kept = {key: value for key, value in _plain(cfg).items() if key not in OUTPUT_KEYS}
    return json.loads(portable(json.dumps(kept)))


def _plain(cfg: DictConfig, resolve: bool = True) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=resolve, throw_on_missing=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _new_record(experiment: str, cfg: DictConfig, weights: bool) -> Record:
    given, config = _plain(cfg), recorded_config(cfg)
    content = {"weights": checkpoint_content(given) if weights else None, "method_sources": method_sources(given)}
    launcher = launcher_words() + ("" if cfg.get("fresh_process", True) else ", points in one process")
    env = {**environment(), "launcher": launcher, **content}
    identity = json.dumps([SCHEMA, experiment, config, env["code"], device_tag(env), content], sort_keys=True)
    point = hashlib.sha256(identity.encode()).hexdigest()[:10]
    return Record(experiment, point, config, env, command=command_line(experiment), started=_now())


def _finished(path: Path) -> Record | None:
    """The record in `path` if there is one whose point has ended, well or badly."""
    try:
        record = read_record(path) if path.exists() else None
    except RecordError:
        return None
    return record if record and record.status != "running" else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
