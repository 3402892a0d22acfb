"""Into a results folder and nothing lost: it is tried before a measurement, and belongs to one process a point."""

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dualdecoder.errors import ConfigError, UserError
from experiments.harness.records import Record, RecordError, read_record, record_text, write_record

# More than most records take, so that a disk with room for no more than a few bytes is found before a measurement.
PROBE_BYTES = 1 << 20
# A file system that knows no locks, some of those over a network: better two measurements of a point than none.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class NotSavedError(UserError):
    """A measured record could not be put where it belongs; the message says where it is kept."""


def probe(folder: Path) -> None:
    """Make `folder` and write and remove a file in it. Raises ConfigError naming the folder and what is wrong."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Random, because zeros may take no room.
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(folder, error) from error


def save_started(path: Path, record: Record) -> None:
    """Write the record of a measurement that is to begin. Raises ConfigError as `probe` does."""
    try:
        write_record(path, record)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    problem = error.strerror or error
    return ConfigError(f"results_dir: {folder} cannot be written: {problem}; allowed: a folder on a disk with room")


@contextmanager
def only_one(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the record `path`: a file beside it, locked for as long as this process lives.

    `wait` is called once if another process holds it, which is then waited for. The file is removed at the end; one
    that a killed process leaves behind is not locked.
    """
    lock = path.with_name(f".{path.name}.lock")
    with _locked(lock, wait):
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


def _locked(lock: Path, wait: Callable[[], None]) -> IO[str]:
    while True:
        file = lock.open("a", encoding="utf-8")
        _lock(file, wait)
        if _is_at(file, lock):
            return file
        # The one before us has removed it meanwhile: whoever comes next would lock another file.
        file.close()


def _lock(file: IO[str], wait: Callable[[], None]) -> None:
    import fcntl  # not on every system

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        wait()
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def save_measured(path: Path, record: Record) -> None:
    """Write the record of a measurement. Raises NotSavedError, with the record kept elsewhere, if that is impossible.

    An invalid record raises ValueError as `write_record` does.
    """
    try:
        write_record(path, record)
    except OSError as error:
        where = _keep_text(path.name, record_text(record))
        raise NotSavedError(
            f"results_dir: {path.name} cannot be written: {error.strerror or error}; what was measured is {where}; "
            f"moved into {path.parent} it is a record like any other"
        ) from error


def keep_rows(name: str, rows: list[dict[str, Any]]) -> str:
    """Keep rows that no record can hold; says where, as `save_measured` does."""
    return _keep_text(name, json.dumps(rows, indent=1, default=str))


def _keep_text(name: str, text: str) -> str:
    """Where the text has gone, in words: into the folder for temporary files, else to the standard output."""
    try:
        kept = Path(tempfile.mkdtemp(prefix="dualdecoder-unsaved-")) / name
        kept.write_text(text, encoding="utf-8")
    except OSError:
        print(text, flush=True)
        return "printed above"
    return f"kept as {kept}"


def next_number(folder: Path, slug: str) -> int:
    """One more than the highest number of the records of the same settings in `folder`, from 1 on."""
    return 1 + max(map(_number, folder.glob(f"{slug}-*.json")), default=0)


def _number(path: Path) -> int:
    try:
        return read_record(path).number
    except RecordError:
        return 0
