"""Which records count: the newest finished one of each config, apart by hardware; the rest is named, not hidden."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import pandas as pd

from experiments.harness.records import FAILURES, Record, RecordError, load_records
from experiments.harness.rows import NUMBER, ROW_FIELDS, table_of
from experiments.harness.untrusted import find_json

CPU_WORDS = "CPU reference, not a GPU speed"
PLANNED_WORDS = "planned bytes (no GPU needed)"
QUALITY_WORDS = "quality, computed on"
IDEAL_WORDS = "ideal: weights and activations only, the paper's bound, not a system"
# Bytes out of plan() are the same on every machine; quality is not a speed, but its last digits may depend on one.
_PLANNED = ("residency",)
_MOST_NAMED = 20
_PLAIN = (str, int, float, bool, NoneType)
_QUALITY = ("prediction", "ruler", "fidelity", "lm_eval")


@dataclass(frozen=True)
class Section:
    """The rows of one experiment on one kind of hardware, with the caption that must stand beside them."""

    caption: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class Collection:
    """All records of a results folder, sorted by what can be said about them."""

    ok: list[Record]
    outdated: list[Record]
    failed: list[Record]
    unfinished: list[Record]
    errors: list[RecordError]

    def sections(self, table: str) -> list[Section]:
        """One section per kind of hardware: a CPU's speeds never stand in a GPU's table."""
        groups: dict[str, list[Record]] = {}
        for record in self.ok:
            if _rows(record, table):
                groups.setdefault(hardware(record), []).append(record)
        outdated = [record for record in self.outdated if _rows(record, table)]
        return [
            Section(
                _caption(name, records, outdated), pd.DataFrame([r for item in records for r in _rows(item, table)])
            )
            for name, records in sorted(groups.items())
        ]


def _rows(record: Record, table: str) -> list[dict[str, Any]]:
    """Rows of a table; of RULER with the point's budget, which the row of a method that has none does not say."""
    point = {"point_budget": _number(record.config.get("budget"))} if record.experiment == "ruler" else {}
    return [{**point, **_tidy(row, table)} for row in record.rows if table_of(record.experiment, row) == table]


def _number(value: Any) -> float | None:
    return value if NUMBER.accepts(value) else None


def _tidy(row: dict[str, Any], table: str) -> dict[str, Any]:
    """A row without what its contract does not know and no column of a table can hold."""
    known = ROW_FIELDS.get(table, {})
    return {
        name: value
        for name, value in row.items()
        if name in known or (name.isidentifier() and isinstance(value, _PLAIN))
    }


def result_folders(results: Path) -> list[Path]:
    """The folders of `results` that hold records: one per machine, apart from one another."""
    return sorted(folder for folder in results.iterdir() if folder.is_dir() and any(find_json(folder)))


def collect_all(results: Path) -> Collection:
    """Every record of every committed folder below `results` together; results/local is nobody's but this machine's."""
    found = [load_records(folder) for folder in result_folders(results) if folder.name != "local"]
    return _sorted_out([records for records, _ in found], [item for _, errors in found for item in errors])


def collect(folder: Path) -> Collection:
    """Read every record below `folder`; of several of the same config and hardware the newest finished one counts."""
    records, errors = load_records(folder)
    return _sorted_out([records], errors)


def _sorted_out(folders: list[list[Record]], errors: list[RecordError]) -> Collection:
    newest = _newest(folders)
    records = [record for folder in folders for record in folder]
    outdated = [record for record in records if record.status == "ok" and newest[_subject(record)] is not record]
    failed = [record for record in records if record.status in FAILURES and not _superseded(record, newest)]
    unfinished = [record for record in records if record.status == "running"]
    ok = [record for record in records if newest.get(_subject(record)) is record]
    return Collection(ok, outdated, failed, unfinished, errors)


def _newest(folders: list[list[Record]]) -> dict[tuple[str, str, str], Record]:
    """The newest good record of each subject: within a folder by its number, between folders by the clock alone."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for records in folders:
        last = {_subject(record): record for record in sorted(records, key=_age) if record.status == "ok"}
        for subject, record in last.items():
            found.setdefault(subject, []).append(record)
    return {subject: max(records, key=lambda item: _age(item)[1:]) for subject, records in found.items()}


def _age(record: Record) -> tuple[int, str, str]:
    """A clock can be set back; the number of a record in its folder cannot. Records of before have number 0."""
    return record.number, record.finished or "", record.point


def hardware(record: Record) -> str:
    """What computed: "NVIDIA H200", "2 x NVIDIA H200" or "CPU" with its model; "any" for what is only planned."""
    if record.experiment in _PLANNED:
        return "any"
    gpus = record.environment.get("gpu")
    devices = [record.config.get("device"), *(row.get("device") for row in record.rows)]
    if not gpus or "cpu" in devices:
        return f"CPU {record.environment.get('cpu', 'of unknown model')}"
    return gpus[0]["name"] if len(gpus) == 1 else f"{len(gpus)} x {gpus[0]['name']}"


def _subject(record: Record) -> tuple[str, str, str]:
    return record.experiment, json.dumps(record.config, sort_keys=True), hardware(record)


def _superseded(record: Record, newest: dict[tuple[str, str, str], Record]) -> bool:
    later = newest.get(_subject(record))
    return later is not None and _age(later)[:2] >= _age(record)[:2]


def _caption(name: str, records: list[Record], outdated: list[Record]) -> str:
    parts = [_origin(name, records)]
    parts.append("commit " + _joined(_commit(record.environment) for record in records))
    parts.append(f"records: {len(records)}")
    if dropped := sum(hardware(record) == name for record in outdated):
        parts.append(f"older records of the same configs, left out: {dropped} (only the newest version counts)")
    if any(row.get("method") == "ideal" for record in records for row in record.rows):
        parts.append(IDEAL_WORDS)
    parts += sorted({row["differs"] for record in records for row in record.rows if row.get("differs")})
    return "; ".join(parts)


def _origin(name: str, records: list[Record]) -> str:
    experiment = records[0].experiment
    if experiment in _PLANNED:
        return PLANNED_WORDS
    where = f"{name}{_details(name, records)}"
    if experiment in _QUALITY:
        return f"{QUALITY_WORDS} {where}"
    return f"Hardware: {where}" + (f"; {CPU_WORDS}" if name.startswith("CPU ") else "")


def _details(name: str, records: list[Record]) -> str:
    if name.startswith("CPU "):
        return f" ({_joined(record.environment.get('torch_threads') for record in records)} threads)"
    gpus = [record.environment["gpu"][0] for record in records]
    links = _joined(f"PCIe {gpu.get('pcie_generation')} x{gpu.get('pcie_width')}" for gpu in gpus)
    return f" ({_joined(gpu.get('memory_mib') for gpu in gpus)} MiB, {links})"


def _commit(environment: dict[str, Any]) -> str:
    commit, dirty = environment.get("commit"), environment.get("dirty")
    state = {True: "dirty", False: "clean", None: "dirty flag unknown"}[dirty]
    return f"{commit[:12] if commit else 'unknown'} ({state})"


def _joined(values: Iterable[Any]) -> str:
    """Each value once, sorted; of very many only the first ones."""
    texts = sorted({str(value) for value in values})
    more = [f"and {len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
    return ", ".join([*texts[:_MOST_NAMED], *more])
