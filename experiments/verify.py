"""The paper's claims, judged from the committed records: python -m experiments.verify [results=...] [update=true]

Writes CLAIMS.md from conf/claims.yaml. Ends with 1 if a verdict that results/expected/ holds is lost or a number has
left its tolerance; ``update=true`` takes the present verdicts and numbers for the expected ones.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from experiments.harness.environment import ROOT
from experiments.harness.options import read_options
from experiments.reporting.claims import NOT_RUN, RANK, ClaimsError, Verdict, judge, read_claims, tag
from experiments.reporting.claims_table import claims_markdown
from experiments.reporting.collect import Collection, collect_all

# Share by which a number may differ from the expected one. Speeds vary from run to run, planned bytes do not.
TOLERANCE = {"any": 0.001, "cpu": 0.02}
GPU_TOLERANCE = 0.05


def main(arguments: list[str]) -> int:
    """Judge, write, compare; returns the exit code: 0, 1 if something is lost, 2 for bad input."""
    defaults = {"results": "results", "claims": "conf/claims.yaml", "output": "CLAIMS.md", "update": "false"}
    try:
        options = read_options(arguments, defaults)
        verdicts, collection = _judge(ROOT / options["claims"], ROOT / options["results"])
    except (ClaimsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (ROOT / options["output"]).write_text(claims_markdown(verdicts), encoding="utf-8")
    expected = ROOT / options["results"] / "expected"
    if options["update"] == "true":
        write_expected(expected, verdicts)
    lost = losses(read_expected(expected), verdicts)
    _show(verdicts, collection, lost)
    return 1 if lost else 0


def losses(expected: dict[str, dict[str, Any]], verdicts: list[Verdict]) -> list[str]:
    """What was reached before, by hardware and claim, and is not reached now."""
    reached = {(tag(verdict.hardware), verdict.claim["id"]): verdict for verdict in verdicts if verdict.hardware}
    lines = []
    for name, claims in sorted(expected.items()):
        for claim, before in claims.items():
            now = reached.get((name, claim))
            words = now.words if now else NOT_RUN
            if RANK[words] < RANK[before["verdict"]]:
                lines.append(f"{claim} on {name}: {words}; it was: {before['verdict']}")
            lines += _moved(f"{claim} on {name}", before, now)
    return lines


def write_expected(folder: Path, verdicts: list[Verdict]) -> None:
    """One file per kind of hardware: verdicts, numbers and the tolerance of each number."""
    files: dict[str, dict[str, Any]] = {}
    for verdict in verdicts:
        if verdict.hardware:
            name = tag(verdict.hardware)
            files.setdefault(name, {})[verdict.claim["id"]] = {
                "verdict": verdict.words,
                "tolerance": TOLERANCE.get(name, GPU_TOLERANCE),
                "values": _values(verdict),
            }
    folder.mkdir(parents=True, exist_ok=True)
    for name, claims in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(claims, sort_keys=False, width=120), encoding="utf-8")


def read_expected(folder: Path) -> dict[str, dict[str, Any]]:
    """Claims by kind of hardware."""
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))}


def _judge(claims: Path, results: Path) -> tuple[list[Verdict], Collection]:
    collection = collect_all(results)
    return judge(read_claims(claims), collection.ok), collection


def _moved(where: str, before: dict[str, Any], now: Verdict | None) -> list[str]:
    values, share = _values(now) if now else {}, before["tolerance"]
    return [
        f"{where}: {name} is {values[name]:.6g}; it was {value:.6g}, tolerance {share:.1%}"
        for name, value in before["values"].items()
        if name in values and abs(values[name] - value) > share * abs(value)
    ]


def _values(verdict: Verdict) -> dict[str, float]:
    # Six digits: more would differ between machines by rounding alone.
    return {item.check["name"]: float(f"{item.number.value:.6g}") for item in verdict.findings if item.number}


def _show(verdicts: list[Verdict], collection: Collection, lost: list[str]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for verdict in verdicts:
        console.print(f"{verdict.claim['id']:4} {verdict.words:15} {verdict.hardware or verdict.claim['not_run']}")
    for error in collection.errors:
        console.print(f"unusable record: {error}", markup=False)
    for line in lost:
        console.print(f"lost: {line}", style="bold red", markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
