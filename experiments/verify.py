"""The paper's claims, judged from the committed records: python -m experiments.verify [update=true] [results_dir=...]

Writes CLAIMS.md from conf/claims.yaml. Ends with 1 if a verdict that results/expected/ holds is lost or a number has
left its tolerance; ``update=true`` takes the present verdicts and numbers for the expected ones.

With ``results_dir=FOLDER``, somebody's own results, their verdicts are printed and nothing of the repository is
written; ``output=FILE`` writes them there.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from experiments.harness.environment import ROOT
from experiments.harness.options import existing_folder, one_line, read_options
from experiments.reporting.claims import NOT_RUN, RANK, Verdict, judge, read_claims, tag
from experiments.reporting.claims_table import claims_markdown
from experiments.reporting.collect import Collection, collect, collect_all
from experiments.reporting.escape import printable

# Share by which a number may differ from the expected one. Speeds vary from run to run, planned bytes do not.
TOLERANCE = {"any": 0.001, "cpu": 0.02}
GPU_TOLERANCE = 0.05


def main(arguments: list[str]) -> int:
    """Judge, write, compare; returns the exit code: 0, 1 if something is lost, 2 for bad input."""
    defaults = {"results": "results", "results_dir": "", "claims": "conf/claims.yaml", "output": "", "update": "false"}
    try:
        options = read_options(arguments, defaults)
        return _verify_own(options) if options["results_dir"] else _verify_committed(options)
    except (OSError, ValueError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2


def _verify_committed(options: dict[str, str]) -> int:
    results = existing_folder("results", options["results"])
    collection = collect_all(results)
    verdicts = judge(read_claims(ROOT / options["claims"]), collection.ok)
    _write(_output(options, own=options["results"] != "results"), verdicts)
    if options["update"] == "true":
        write_expected(results / "expected", verdicts)
    lost = losses(read_expected(results / "expected"), verdicts)
    _show(verdicts, collection, lost)
    return 1 if lost else 0


def _verify_own(options: dict[str, str]) -> int:
    """Print the verdicts of records that nobody promised anything about: nothing can be lost."""
    if options["update"] == "true":
        raise ValueError("update=true is not allowed with results_dir; allowed: without it, for the committed results")
    collection = collect(existing_folder("results_dir", options["results_dir"]))
    verdicts = judge(read_claims(ROOT / options["claims"]), collection.ok)
    _write(_output(options, own=True), verdicts)
    _show(verdicts, collection, [])
    return 0


def _output(options: dict[str, str], own: bool) -> Path | None:
    """Where the verdicts go; those of other results than the committed ones never into the repository's CLAIMS.md."""
    given = options["output"]
    if not own:
        return ROOT / (given or "CLAIMS.md")
    if given and (ROOT / given).resolve() == (ROOT / "CLAIMS.md").resolve():
        raise ValueError(f"output={given!r} is not allowed; allowed: a file that is not CLAIMS.md of the repository")
    return ROOT / given if given else None


def _write(path: Path | None, verdicts: list[Verdict]) -> None:
    if path:
        path.write_text(claims_markdown(verdicts), encoding="utf-8")


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
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for verdict in verdicts:
        where = printable(verdict.hardware or verdict.claim["not_run"])
        console.print(f"{verdict.claim['id']:4} {verdict.words:15} {where}")
    for error in collection.errors:
        console.print(f"unusable record: {printable(error)}")
    for line in lost:
        console.print(f"lost: {printable(line)}", style="bold red")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
