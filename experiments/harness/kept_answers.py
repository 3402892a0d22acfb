"""Requests answered in sorted batches, each answer kept in a file, so that a stopped run can go on."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.workload import progress


class KeptAnswers:
    """Answers to requests, appended to a JSON-lines file as they come, so that a stopped run can go on."""

    def __init__(self, path: Path | None, identity: str) -> None:
        self.path, self.identity = path, identity
        self.known = dict(_read_lines(path)) if path is not None and path.is_file() else {}

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
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, value]) + "\n")


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            key, value = json.loads(line)
        except ValueError:
            # The last line of a process that was killed while it wrote.
            continue
        yield key, value


def _groups(items: list[Any], size: int, alike: Callable[[Any], Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        if group and (len(group) == size or alike(item) != alike(group[0])):
            yield group
            group = []
        group.append(item)
    if group:
        yield group
