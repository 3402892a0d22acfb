"""Requests answered in sorted batches, each answer kept in a file, so that a stopped run can go on.

lm-eval has a cache of its own (`use_cache`). It is not used because its file holds pickles, which run code when they
are read, gives up where another process writes for five seconds, and says nothing of the model that answered.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dualdecoder.errors import ConfigError
from experiments.harness.workload import progress

_log = logging.getLogger(__name__)


class KeptAnswers:
    """Answers to requests, appended to a JSON-lines file as they come, so that a stopped run can go on.

    Args:
        path: the file, made if it is absent; None keeps nothing.  Several processes may write it at once.
        identity: everything an answer depends on beside its request, see ``answers_identity``.  Answers of another
            identity stay in the file and are not used.

    Raises:
        ConfigError: the file can be neither read nor written.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self.path, self.identity = path, identity
        self.known = {} if path is None else _opened(path)

    def answer_all(
        self,
        kind: str,
        items: Sequence[Any],
        answer: Callable[[list[Any]], list[Any]],
        batch: int,
        order: Callable[[Any], Any],
        alike: Callable[[Any], Any] = lambda item: None,
    ) -> list[Any]:
        """Answers in the order of ``items``; those not known yet are asked for in sorted batches of like ones."""
        keys = [self._key(kind, item) for item in items]
        open_items = {key: item for key, item in zip(keys, items, strict=True) if key not in self.known}
        waiting = sorted(open_items.items(), key=lambda pair: order(pair[1]))
        groups = list(_groups(waiting, batch, lambda pair: alike(pair[1])))
        for group in progress(groups, f"lm-eval {kind}", total=len(groups)):
            for (key, _), value in zip(group, answer([item for _, item in group]), strict=True):
                self._keep(key, value)
        return [self.known[key] for key in keys]

    def _key(self, kind: str, item: Any) -> str:
        return hashlib.sha256(json.dumps([self.identity, kind, item], sort_keys=True).encode()).hexdigest()

    def _keep(self, key: str, value: Any) -> None:
        self.known[key] = value
        if self.path is None:
            return
        try:
            _append(self.path, json.dumps([key, value]))
        except OSError as error:
            # A full disk must not cost the answers that are still to come.
            _log.warning("%s: answers are no longer kept: %s", self.path, error.strerror or error)
            self.path = None


def _opened(path: Path) -> dict[str, Any]:
    """The answers in a file, which is made if it is absent, so that what cannot be written is found at the start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            return dict(_answers(file.read()))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"resume={str(path)!r} is not allowed ({reason}); allowed: a file to be written") from error


def _answers(content: bytes) -> Iterator[tuple[str, Any]]:
    """Key and answer of each line that holds them, also behind one that a killed process left unfinished."""
    for line in content.decode("utf-8", errors="replace").split("\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, list) and len(found) == 2 and isinstance(found[0], str) and _is_answer(found[1]):
            yield found[0], found[1]


def _is_answer(value: Any) -> bool:
    """Whether this is a text, or a log-likelihood and whether it is the greedy continuation."""
    if isinstance(value, list) and len(value) == 2:
        return isinstance(value[0], float) and isinstance(value[1], bool)
    return isinstance(value, str)


def _append(path: Path, line: str) -> None:
    """Write one whole line in one piece; a line that somebody was killed in the middle of is ended before it."""
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        torn = end > 0 and file.read(1) != b"\n"
        data = (b"\n" if torn else b"") + line.encode() + b"\n"
        if file.write(data) < len(data):
            raise OSError("no space left on the device")


def _groups(items: list[Any], size: int, alike: Callable[[Any], Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        if group and (len(group) == size or alike(item) != alike(group[0])):
            yield group
            group = []
        group.append(item)
    if group:
        yield group
