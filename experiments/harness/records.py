"""One JSON file per measured point: written atomically, validated on every read and write."""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

from experiments.harness.rows import environment_problem, error_problem, row_problem
from experiments.harness.untrusted import UntrustedError, find_json, read_json

SCHEMA = 3
# How a point can have ended without rows; too little memory is a result of its own.
FAILURES = ("failed", "out_of_memory")
STATUSES = ("running", "ok", *FAILURES)


class RecordError(ValueError):
    """A record that cannot be used; the message names the file, the field and what is allowed."""

    def __init__(self, path: Path, field_name: str, problem: str) -> None:
        super().__init__(f"{path}: field '{field_name}' {problem}")
        self.path = path
        self.field = field_name


@dataclass(frozen=True)
class Record:
    """A point: what was asked (`config`), where (`environment`), how it ended (`status`), what was seen (`rows`).

    `started` and `finished` are UTC in ISO 8601, `seconds` is the wall time of the measurement and its process, `error`
    holds type, message and traceback, or for a process that died its exit status and the end of what it printed. A
    record still "running" belongs to a run that is under way or was interrupted. `number` counts the records of the
    same settings in one results folder as they were started, from 1 on: it says which is newer, whatever the clock was.
    """

    experiment: str
    point: str
    config: dict[str, Any]
    environment: dict[str, Any]
    command: str
    started: str
    finished: str | None = None
    seconds: float | None = None
    status: str = "running"
    error: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    schema: int = SCHEMA


_TYPES: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "experiment": (str,),
    "point": (str,),
    "config": (dict,),
    "environment": (dict,),
    "command": (str,),
    "started": (str,),
    "finished": (str, NoneType),
    "seconds": (int, float, NoneType),
    "status": (str,),
    "error": (dict, NoneType),
    "rows": (list,),
    "number": (int,),
}
assert set(_TYPES) == {item.name for item in fields(Record)}


def read_record(path: Path) -> Record:
    """The record in `path`. Raises RecordError for a file that is unreadable, truncated or not of this schema."""
    try:
        data = read_json(path)
    except UntrustedError as error:
        raise RecordError(path, "(whole file)", str(error)) from error
    return _parse(path, data)


def load_records(folder: Path) -> tuple[list[Record], list[RecordError]]:
    """Every record below `folder` in path order, and an error for each file or folder that cannot be read.

    Symlinked folders are followed.
    """
    paths, unread = find_json(folder)
    records, errors = [], [RecordError(item.path, "(folder)", item.problem) for item in unread]
    for path in paths:
        try:
            records.append(read_record(path))
        except RecordError as error:
            errors.append(error)
    return records, errors


def record_text(record: Record) -> str:
    """What a record's file holds. Raises ValueError for numbers that are not finite."""
    return json.dumps(asdict(record), indent=1, allow_nan=False) + "\n"


def write_record(path: Path, record: Record) -> None:
    """Put `record` at `path` whole or not at all. An invalid one raises ValueError (RecordError for a field)."""
    _parse(path, asdict(record))
    text = record_text(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name does not end in .json: a file that a killed process leaves behind is never read as a record.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read; records are to be shared.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _parse(path: Path, data: Any) -> Record:
    if not isinstance(data, dict):
        raise RecordError(path, "(whole file)", "must be a JSON object")
    _check_schema(path, data)
    data = _upgraded(data)
    for name, types in _TYPES.items():
        if name not in data:
            raise RecordError(path, name, "is missing")
        if not isinstance(data[name], types):
            allowed = " or ".join("null" if kind is NoneType else kind.__name__ for kind in types)
            raise RecordError(path, name, f"is {type(data[name]).__name__}; allowed: {allowed}")
    _check_status(path, data)
    problem = (
        environment_problem(data["environment"])
        or error_problem(data["error"])
        or row_problem(data["experiment"], data["rows"])
    )
    if problem:
        raise RecordError(path, *problem)
    return Record(**data)


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """What the schemas before did not know yet.

    Schema 1 knew no `out_of_memory` and no launcher, one process measured all points of a sweep. Schema 2 had no
    number: its records are older than any that has one. Neither had the content of checkpoints and methods.
    """
    if data["schema"] == SCHEMA:
        return data
    environment = data.get("environment")
    if data["schema"] == 1 and isinstance(environment, dict):
        data = {**data, "environment": {"launcher": "none", **environment}}
    return {"number": 0, **data, "schema": SCHEMA}


def _check_schema(path: Path, data: dict[str, Any]) -> None:
    # First of all checks: a newer schema may rename any other field.
    if "schema" not in data:
        raise RecordError(path, "schema", "is missing")
    if data["schema"] not in range(1, SCHEMA + 1):
        raise RecordError(path, "schema", f"is {data['schema']!r:.60}; this code reads 1 to {SCHEMA}")
    if unknown := sorted(set(data) - set(_TYPES)):
        raise RecordError(path, unknown[0][:60], f"is unknown to schema {SCHEMA}")


def _check_status(path: Path, data: dict[str, Any]) -> None:
    if data["status"] not in STATUSES:
        raise RecordError(path, "status", f"is {data['status']!r:.60}; allowed: {', '.join(STATUSES)}")
    if (data["status"] == "running") != (data["finished"] is None):
        raise RecordError(path, "finished", "must be null while the status is running, and a time otherwise")
    if (data["status"] in FAILURES) != (data["error"] is not None):
        raise RecordError(path, "error", f"must be there if the status is {' or '.join(FAILURES)}, and null otherwise")
