"""Run a list of experiments and report: python -m experiments.reproduce [profile=cpu|gpu|paper] [results_dir=...]

The profiles are conf/reproduce.yaml, conf/reproduce_gpu.yaml and conf/reproduce_paper.yaml; `runs=FILE` takes another
list, `checkpoint=ID_OR_FOLDER` another real model for the runs that use one.
"""

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from dualdecoder.pinned import available_host_bytes
from experiments.harness.environment import ROOT, visible_gpus
from experiments.harness.options import read_options
from experiments.harness.points import results_folder
from experiments.report import build_report

PACKAGE = "experiments"
INTERRUPTED = 130
# A terminal's Ctrl-C reaches the child as well; this is how long it may take to leave before it is told again.
GRACE_S = 10.0
_NOT_RUNS = ("report", "reproduce", "verify", "notebooks", "harness", "reporting")
PROFILES = {"cpu": "conf/reproduce.yaml", "gpu": "conf/reproduce_gpu.yaml", "paper": "conf/reproduce_paper.yaml"}


class RunsError(ValueError):
    """A list of runs that cannot be used; the message names the field and what is allowed."""


@dataclass(frozen=True)
class Run:
    """One child process: an experiment, its Hydra arguments, and about how many minutes it takes."""

    experiment: str
    overrides: list[str]
    minutes: float


@dataclass(frozen=True)
class Profile:
    """Runs in their order, where their records go, and the GiB of GPU and host memory without which none can start."""

    runs: list[Run]
    results_dir: str
    gpu_gib: float = 0
    host_gib: float = 0


def main(arguments: list[str]) -> int:
    """Run the list, build the report; returns the exit code: 0, 1 if a run failed, 2 for bad input, 130 on Ctrl-C."""
    try:
        options = read_options(arguments, {"profile": "cpu", "runs": "", "results_dir": "", "checkpoint": ""})
        profile = read_profile(_file(options), options["checkpoint"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if missing := missing_hardware(profile):
        print("error: this profile cannot run here: " + "; ".join(missing), file=sys.stderr)
        return 2
    results_dir = options["results_dir"] or profile.results_dir
    minutes = sum(run.minutes for run in profile.runs)
    print(
        f"{len(profile.runs)} runs, about " + (f"{minutes / 60:.1f} hours" if minutes > 90 else f"{minutes:g} minutes")
    )
    code = run_all(profile.runs, results_dir)
    build_report(results_folder(results_dir))
    return code


def missing_hardware(profile: Profile) -> list[str]:
    """What the profile needs and this machine lacks, in words."""
    gpus, missing = visible_gpus() if profile.gpu_gib else [], []
    if profile.gpu_gib and not gpus:
        missing.append("an NVIDIA GPU is needed, with its driver and a PyTorch build with CUDA")
    held = max((float(gpu.fields["memory_mib"]) / 1024 for gpu in gpus), default=profile.gpu_gib)
    for what, needed, present in (
        ("GPU", profile.gpu_gib, held),
        ("free host", profile.host_gib, available_host_bytes() / 2**30),
    ):
        if needed > present:
            missing.append(f"{needed:g} GiB of {what} memory are needed, {present:.0f} are there")
    return missing


def _file(options: dict[str, str]) -> Path:
    if options["runs"]:
        return ROOT / options["runs"]
    name = options["profile"]
    _check(name in PROFILES, "profile", ", ".join(PROFILES))
    return ROOT / PROFILES[name]


def read_profile(path: Path, checkpoint: str = "") -> Profile:
    """The runs that a YAML file names, with the checkpoint put where it says {checkpoint}. Raises RunsError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RunsError(f"{path}: is not a readable YAML file: {error}") from error
    needed, allowed = {"runs", "results_dir"}, {"runs", "results_dir", "needs", "checkpoint"}
    _check(isinstance(data, dict) and needed <= set(data) <= allowed, "runs, results_dir", "both, needs, checkpoint")
    _check(isinstance(data["results_dir"], str) and data["results_dir"] != "", "results_dir", "a folder")
    _check(isinstance(data["runs"], list) and data["runs"] != [], "runs", "a list of one or more runs")
    needs = data.get("needs", {})
    numbers = isinstance(needs, dict) and all(_is_positive(value) for value in needs.values())
    _check(numbers and set(needs) <= {"gpu_gib", "host_gib"}, "needs", "gpu_gib and host_gib, numbers above 0")
    runs = [_read_run(f"runs[{index}]", item) for index, item in enumerate(data["runs"])]
    source = checkpoint or str(data.get("checkpoint", ""))
    filled = [replace(run, overrides=[text.replace("{checkpoint}", source) for text in run.overrides]) for run in runs]
    return Profile(filled, data["results_dir"], **needs)


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
    _check(_is_positive(minutes), f"{where}.minutes", "a number above 0")
    return Run(name, overrides, minutes)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_experiment(name: Any) -> bool:
    if not isinstance(name, str) or not name.isidentifier() or name in _NOT_RUNS:
        return False
    return importlib.util.find_spec(f"{PACKAGE}.{name}") is not None


def _check(holds: bool, field: str, allowed: str) -> None:
    if not holds:
        raise RunsError(f"field '{field}' is wrong; allowed: {allowed}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
