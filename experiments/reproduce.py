"""Run a list of experiments and report: python -m experiments.reproduce [runs=conf/reproduce.yaml] [results_dir=...]"""

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from experiments.harness.environment import ROOT
from experiments.harness.options import read_options
from experiments.harness.points import results_folder
from experiments.report import build_report

PACKAGE = "experiments"
INTERRUPTED = 130
# A terminal's Ctrl-C reaches the child as well; this is how long it may take to leave before it is told again.
GRACE_S = 10.0
_NOT_RUNS = ("report", "reproduce", "harness", "reporting")


class RunsError(ValueError):
    """A list of runs that cannot be used; the message names the field and what is allowed."""


@dataclass(frozen=True)
class Run:
    """One child process: an experiment, its Hydra arguments, and about how many minutes it takes."""

    experiment: str
    overrides: list[str]
    minutes: float


def main(arguments: list[str]) -> int:
    """Run the list, build the report; returns the exit code: 0, 1 if a run failed, 2 for bad input, 130 on Ctrl-C."""
    try:
        options = read_options(arguments, {"runs": "conf/reproduce.yaml", "results_dir": ""})
        runs, results_dir = read_runs(ROOT / options["runs"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results_dir = options["results_dir"] or results_dir
    code = run_all(runs, results_dir)
    build_report(results_folder(results_dir))
    return code


def read_runs(path: Path) -> tuple[list[Run], str]:
    """The runs and the results folder that a YAML file names. Raises RunsError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RunsError(f"{path}: is not a readable YAML file: {error}") from error
    _check(isinstance(data, dict) and set(data) == {"runs", "results_dir"}, "runs, results_dir", "both, and no others")
    _check(isinstance(data["results_dir"], str) and data["results_dir"] != "", "results_dir", "a folder")
    _check(isinstance(data["runs"], list) and data["runs"] != [], "runs", "a list of one or more runs")
    return [_read_run(f"runs[{index}]", item) for index, item in enumerate(data["runs"])], data["results_dir"]


def run_all(runs: list[Run], results_dir: str) -> int:
    """Run each in a process of its own that has this terminal; a failed one does not stop the others."""
    console, failed = Console(highlight=False), []
    for number, run in enumerate(runs, start=1):
        console.rule(f"{number}/{len(runs)} {run.experiment} (about {run.minutes:g} min)")
        begin = time.monotonic()
        try:
            code = _run_child(_command(run, results_dir))
        except KeyboardInterrupt:
            console.print("Interrupted. Finished points are kept; the same command goes on after them.")
            return INTERRUPTED
        outcome = "done" if code == 0 else f"[bold red]failed[/bold red] with exit code {code}"
        console.print(f"{number}/{len(runs)} {run.experiment} {outcome} after {time.monotonic() - begin:.0f} s")
        if code != 0:
            failed.append(run)
    for run in failed:
        console.print(f"failed: {escape(' '.join([run.experiment, *run.overrides]))}", style="bold red")
    return 1 if failed else 0


def _command(run: Run, results_dir: str) -> list[str]:
    return [sys.executable, "-m", f"{PACKAGE}.{run.experiment}", *run.overrides, f"results_dir={results_dir}"]


def _run_child(command: list[str]) -> int:
    """The exit code of `command`; on an interrupt the child is ended before KeyboardInterrupt goes on."""
    with subprocess.Popen(command, cwd=ROOT) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            _end(child)
            raise


def _end(child: subprocess.Popen[bytes]) -> None:
    for last_word in (child.terminate, child.kill):
        try:
            child.wait(GRACE_S)
            return
        except subprocess.TimeoutExpired:
            last_word()


def _read_run(where: str, item: Any) -> Run:
    names = {"experiment", "overrides", "minutes"}
    _check(isinstance(item, dict) and set(item) == names, where, "experiment, overrides and minutes, and no others")
    name, overrides, minutes = item["experiment"], item["overrides"], item["minutes"]
    _check(_is_experiment(name), f"{where}.experiment", "the name of a module in experiments/ that measures")
    _check(
        isinstance(overrides, list) and all(isinstance(text, str) for text in overrides),
        f"{where}.overrides",
        "a list of texts such as context=1024",
    )
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    _check(number and minutes > 0, f"{where}.minutes", "a number above 0")
    return Run(name, overrides, minutes)


def _is_experiment(name: Any) -> bool:
    if not isinstance(name, str) or not name.isidentifier() or name in _NOT_RUNS:
        return False
    return importlib.util.find_spec(f"{PACKAGE}.{name}") is not None


def _check(holds: bool, field: str, allowed: str) -> None:
    if not holds:
        raise RunsError(f"field '{field}' is wrong; allowed: {allowed}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
