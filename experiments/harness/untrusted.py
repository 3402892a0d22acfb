"""Files of records that anyone may have written: all found, none read beyond bounds, none waited for."""

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# Far beyond what an experiment writes: the largest record so far has 0.3 MB and six levels.
MOST_BYTES = 32 * 2**20
MOST_LEVELS = 32
MOST_INTEGER = 2**63 - 1
MOST_WORDS = 200


class UntrustedError(ValueError):
    """A file that cannot be used as a record; the message says why, in one line."""


@dataclass(frozen=True)
class Unread:
    """A place in a folder of records at which there is nothing to read, and why."""

    path: Path
    problem: str


def find_json(folder: Path) -> tuple[list[Path], list[Unread]]:
    """Every ``*.json`` below `folder` in path order, through symlinked folders too, and what could not be looked at.

    A folder that is reached twice (a link to one above it) is read once, under the first of its names.
    """
    paths: list[Path] = []
    unread: list[Unread] = []
    waiting, seen = [folder], set[tuple[int, int]]()
    while waiting:
        inside = waiting.pop()
        try:
            found = inside.stat()
            entries = sorted(inside.iterdir()) if (found.st_dev, found.st_ino) not in seen else []
        except OSError as error:
            unread.append(Unread(inside, f"cannot be looked into: {error.strerror or error}"))
            continue
        seen.add((found.st_dev, found.st_ino))
        # The last one is taken next: in reverse, folders are walked in their order.
        waiting += [entry for entry in reversed(entries) if _is_folder(entry)]
        paths += [entry for entry in entries if entry.suffix == ".json"]
        # One whose name says that it is a record is among the paths, and not readable.
        broken = [entry for entry in entries if entry.suffix != ".json" and _is_broken_link(entry)]
        unread += [Unread(entry, "is a link to nothing") for entry in broken]
    return sorted(paths), unread


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises UntrustedError.

    Refused are what is no regular file, over 32 MiB or 32 levels, NaN and Infinity, numbers beyond 64 bits or a
    double, and texts that are no Unicode.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            content = _bytes(file)
    except OSError as error:
        raise UntrustedError(f"is not readable: {error.strerror or error}") from error
    try:
        value = json.loads(content, parse_int=_integer, parse_float=_double, parse_constant=_constant)
    except RecursionError:
        raise UntrustedError(f"is nested too deep; allowed: {MOST_LEVELS} levels") from None
    except ValueError as error:
        raise UntrustedError(f"is not readable JSON: {error}") from error
    _check_values(value)
    return value


def shortened(text: str) -> str:
    """The first 200 characters of a text for a message."""
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


def _open_at_once(path: str, flags: int) -> int:
    # To open a named pipe would wait for whoever writes into it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _bytes(file: BinaryIO) -> bytes:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise UntrustedError("is not a regular file")
    # One more than allowed: a file may grow while it is read.
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UntrustedError(f"is larger than a record may be; allowed: {MOST_BYTES // 2**20} MiB")
    return content


def _integer(text: str) -> int:
    # By length first: to turn a million digits into a number takes minutes.
    if len(text) > 20 or abs(int(text)) > MOST_INTEGER:
        raise ValueError(f"the number {shortened(text)} has more than 64 bits")
    return int(text)


def _double(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {shortened(text)} is too large")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _check_values(value: Any) -> None:
    """Depth and texts, level by level: a recursion would end at the depth that is looked for."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_LEVELS:
            raise UntrustedError(f"is nested too deep; allowed: {MOST_LEVELS} levels")
        level = [inner for item in level for inner in _inside(item)]


def _inside(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item
        yield from item.values()
    elif isinstance(item, list):
        yield from item
    elif isinstance(item, str):
        try:
            item.encode()
        except UnicodeEncodeError:
            raise UntrustedError("holds half of a surrogate pair, which is no text") from None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _is_broken_link(path: Path) -> bool:
    try:
        return path.is_symlink() and not path.exists()
    except OSError:
        return True
