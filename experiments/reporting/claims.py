"""The paper's claims against the records: numbers by rule from conf/claims.yaml, a verdict for each kind of hardware.

Nothing in the YAML file is evaluated as code. A claim is judged apart on planned bytes ("any"), on a CPU, on each GPU.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import yaml

from experiments.harness.attended import SPEEDS, is_equal_work, known_share
from experiments.harness.records import Record
from experiments.harness.rows import NUMBER, TIMES
from experiments.reporting.collect import hardware

REPRODUCED, PARTLY, NOT_REPRODUCED, NOT_RUN = "reproduced", "partly", "not reproduced", "not run"
RANK = {NOT_RUN: 0, NOT_REPRODUCED: 1, PARTLY: 2, REPRODUCED: 3}
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "only": lambda values: values[0],
    "max": max,
    "min": min,
    "mean": fmean,
    "median": median,
}
_CLAIM = {"id", "claim", "where_in_paper", "command", "minutes", "not_run", "checks"}
_NUMBER = {"experiment", "where", "config", "column", "statistic"}
_NEEDED = _NUMBER - {"config"}
_RULES = ("within", "at_least", "at_most")
_CHECK = {"name", "paper", "needs_gpu", "instead", "over", "minus", "unit", "samples", *_RULES, *_NUMBER}


class ClaimsError(ValueError):
    """A list of claims that cannot be used; the message names the field and what is allowed."""


@dataclass(frozen=True)
class Number:
    """A number out of records; `spread` is half of p10 to p90 of its raw samples as a share, None without samples."""

    value: float
    spread: float | None = None


@dataclass(frozen=True)
class Finding:
    """One check on one kind of hardware; without records `number` is None.

    left_out: rows that would have counted, were their speeds known to be those of equal work.
    """

    check: dict[str, Any]
    number: Number | None
    left_out: int = 0

    @property
    def holds(self) -> bool:
        return self.number is not None and _holds(self.check, self.number.value)


@dataclass(frozen=True)
class Verdict:
    """A claim on one kind of hardware; on none if no check has records."""

    claim: dict[str, Any]
    hardware: str | None
    findings: list[Finding]

    @property
    def words(self) -> str:
        measured = [finding for finding in self.findings if finding.number]
        if not measured:
            return NOT_RUN
        if not any(finding.holds for finding in measured):
            return NOT_REPRODUCED
        whole = all(finding.holds and "instead" not in finding.check for finding in self.findings)
        return REPRODUCED if whole and not self.claim.get("unmeasured") else PARTLY


def read_claims(path: Path) -> list[dict[str, Any]]:
    """The claims of a YAML file. Raises ClaimsError naming the claim and the field."""
    try:
        claims = yaml.safe_load(path.read_text(encoding="utf-8"))["claims"]
    except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
        raise ClaimsError(f"{path}: is not a YAML file with a list 'claims': {error}") from error
    for claim in claims:
        name = claim.get("id", "a claim without id")
        _require_keys(name, claim, _CLAIM, _CLAIM | {"unmeasured"})
        for check in claim["checks"]:
            _check_check(f"{name}, {check.get('name', 'a check without name')}", check)
    return claims


def judge(claims: list[dict[str, Any]], records: list[Record]) -> list[Verdict]:
    """A verdict for each claim and kind of hardware with records for it; one "not run" for a claim without any."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(hardware(record), []).append(record)
    verdicts = []
    for claim in claims:
        found = [Verdict(claim, name, _findings(claim, name, group)) for name, group in sorted(groups.items())]
        reached = [verdict for verdict in found if verdict.words != NOT_RUN]
        verdicts += reached or [Verdict(claim, None, _nowhere(claim, found))]
    return verdicts


def tag(name: str) -> str:
    """A kind of hardware as the name of a file: any, cpu, nvidia-h200."""
    return "cpu" if name.startswith("CPU ") else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _findings(claim: dict[str, Any], name: str, records: list[Record]) -> list[Finding]:
    on_gpu = name != "any" and not name.startswith("CPU ")
    return [
        Finding(check, _number(check, records), _left_out(check, records))
        if on_gpu or not check.get("needs_gpu")
        else Finding(check, None)
        for check in claim["checks"]
    ]


def _nowhere(claim: dict[str, Any], found: list[Verdict]) -> list[Finding]:
    """What is said of a claim that no hardware has a number for."""
    left_out = [sum(verdict.findings[place].left_out for verdict in found) for place in range(len(claim["checks"]))]
    return [Finding(check, None, rows) for check, rows in zip(claim["checks"], left_out, strict=True)]


def _number(check: dict[str, Any], records: list[Record]) -> Number | None:
    first = _single(check, records)
    for key, combine in (("over", _ratio), ("minus", _difference)):
        if key in check and first is not None:
            second = _single({**check, **check[key]}, records)
            first = combine(first, second) if second is not None else None
    return first


def _single(spec: dict[str, Any], records: list[Record]) -> Number | None:
    rows = [row for row in _rows(spec, records) if _value(row, spec["column"]) is not None]
    if not rows:
        return None
    values = [_value(row, spec["column"]) / spec.get("unit", 1) for row in rows]
    if spec["statistic"] == "only" and len(set(values)) > 1:
        raise ClaimsError(f"{spec['name']}: {len(values)} rows match {spec['where']}; allowed: one, or a statistic")
    value = STATISTICS[spec["statistic"]](values)
    return Number(value, _spread(rows[values.index(value)], spec.get("samples")) if value in values else None)


def _left_out(check: dict[str, Any], records: list[Record]) -> int:
    specs = [check, *({**check, **check[key]} for key in ("over", "minus") if key in check)]
    return sum(not _counts(spec, row) for spec in specs for row in _matching(spec, records))


def _rows(spec: dict[str, Any], records: list[Record]) -> Iterable[dict[str, Any]]:
    return (row for row in _matching(spec, records) if _counts(spec, row))


def _counts(spec: dict[str, Any], row: dict[str, Any]) -> bool:
    """A speed counts only if the method is known to have attended to what it should have."""
    return spec["experiment"] not in SPEEDS or is_equal_work(known_share(row))


def _matching(spec: dict[str, Any], records: list[Record]) -> Iterable[dict[str, Any]]:
    return (
        row
        for record in records
        if record.experiment == spec["experiment"] and _matches(record.config, spec.get("config", {}))
        for row in record.rows
        if _matches(row, spec["where"])
    )


def _matches(values: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """A list stands for any of its values."""
    return all(values.get(key) in (one if isinstance(one, list) else [one]) for key, one in wanted.items())


def _value(row: dict[str, Any], column: str | list[str]) -> float | None:
    """A column, a category of bytes (`gpu.landmarks`), or the sum of several; None if the row has none of them."""
    if isinstance(column, list):
        parts = [value for value in (_value(row, name) for name in column) if value is not None]
        return sum(parts) if parts else None
    name, _, category = column.partition(".")
    value = row.get(name)
    if category:
        value = value.get(category) if isinstance(value, dict) else None
    return value if NUMBER.accepts(value) else None


def _spread(row: dict[str, Any], samples: str | None) -> float | None:
    if samples is None or not TIMES.accepts(row.get(samples)):
        return None
    low, middle, high = np.percentile(row[samples], (10, 50, 90))
    return float((high - low) / 2 / middle)


def _ratio(first: Number, second: Number) -> Number | None:
    if not second.value:
        return None
    spreads = [number.spread for number in (first, second) if number.spread is not None]
    return Number(first.value / second.value, sum(spreads) if spreads else None)


def _difference(first: Number, second: Number) -> Number:
    return Number(first.value - second.value)


def _holds(check: dict[str, Any], value: float) -> bool:
    if "within" in check:
        return abs(value - check["paper"]) <= check["within"] * abs(check["paper"])
    return value >= check["at_least"] if "at_least" in check else value <= check["at_most"]


def _check_check(name: str, check: dict[str, Any]) -> None:
    _require_keys(name, check, {"name", *_NEEDED}, _CHECK)
    if sum(rule in check for rule in _RULES) != 1 or ("within" in check and "paper" not in check):
        raise ClaimsError(f"{name}: one of {', '.join(_RULES)} is needed, and 'paper' with 'within'")
    if check["statistic"] not in STATISTICS:
        raise ClaimsError(f"{name}: statistic={check['statistic']!r}; allowed: {', '.join(STATISTICS)}")
    for key in ("over", "minus"):
        _require_keys(f"{name}, {key}", check.get(key, {}), set(), _NUMBER)


def _require_keys(name: str, given: dict[str, Any], needed: set[str], allowed: set[str]) -> None:
    if missing := sorted(needed - set(given)):
        raise ClaimsError(f"{name}: field '{missing[0]}' is missing")
    if unknown := sorted(set(given) - allowed):
        raise ClaimsError(f"{name}: field '{unknown[0]}' is not known; allowed: {', '.join(sorted(allowed))}")
