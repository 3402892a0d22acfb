"""Digests of the files that decide a model's answers, so that a model is known by content and not by path.

A file's digest is kept in the user's cache under its path, size, times and inode: reading 16 GB takes a quarter of a
minute, and every point of a sweep asks. The change time, which no program can set, is among them: a file that is
rewritten in place, with the same size and its old modification time, is read again.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from dualdecoder.cache import cache_folder
from dualdecoder.errors import CheckpointError

# Two writes within one tick of the file system's clock leave the same times, so a digest of a file that has just
# been written is not kept. Two seconds is the coarsest tick in use (FAT).
SETTLED_NS = 2_000_000_000


def content_digest(files: Mapping[str, Path]) -> str:
    """``sha256:`` and 16 hex digits over the names (the keys) and the contents of ``files``, in the names' order.

    Raises ``CheckpointError`` if a file cannot be read or changes meanwhile.
    """
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{file_digest(files[name])}\n".encode())
    return f"sha256:{whole.hexdigest()[:16]}"


def file_digest(path: Path) -> str:
    """Hex SHA-256 of a file's content, from the cache if the file has not been touched since."""
    try:
        state = _state(path)
        kept = _kept_at(path, state)
        return _read(kept) or _computed(path, state, kept)
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} is not readable: {error.strerror or error}") from error


def _state(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def _kept_at(path: Path, state: tuple[int, ...]) -> Path:
    key = hashlib.sha256(f"{path.resolve()}\0{state}".encode()).hexdigest()
    return cache_folder() / "digests" / key[:32]


def _read(kept: Path) -> str | None:
    try:
        text = kept.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def _computed(path: Path, state: tuple[int, ...], kept: Path) -> str:
    begin = time.time_ns()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _state(path) != state:
        raise CheckpointError(f"{path.parent.name}/{path.name} was written while it was read; try again")
    _, modified, changed, *_ = state
    if max(modified, changed) < begin - SETTLED_NS:
        _keep(kept, digest)
    return digest


def _keep(kept: Path, digest: str) -> None:
    # A cache that cannot be written costs time, not the answer.
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(digest)
        os.replace(temporary, kept)
    except OSError:
        return
