"""The list of runs is validated as a whole; a failed child stops nothing; Ctrl-C is clean."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import reproduce
from experiments.harness.environment import ROOT, Gpu
from experiments.reproduce import PROFILES, Profile, RunsError, missing_hardware, read_profile

LAB = {
    "good": "import sys; open(sys.argv[-1].partition('=')[2] + '/seen', 'a').write(' '.join(sys.argv[1:]) + '\\n')",
    "bad": "import sys; sys.exit(3)",
    "slow": "import signal; print('started', flush=True); signal.pause()",
}
MAIN = """
import sys
from experiments import reproduce
reproduce.PACKAGE, reproduce.GRACE_S = "lab", 1
sys.exit(reproduce.main(sys.argv[1:]))
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch) -> Path:
    """A folder with a package `lab` of experiments that measure nothing, in place of `experiments`."""
    (tmp_path / "lab").mkdir()
    for name, source in LAB.items():
        (tmp_path / "lab" / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(reproduce, "PACKAGE", "lab")
    return tmp_path


def write_runs(folder: Path, *names: str) -> str:
    lines = [f"- {{experiment: {name}, overrides: [-m, 'a=1,2'], minutes: 1}}" for name in names]
    (folder / "runs.yaml").write_text(f"results_dir: {folder}\nruns:\n" + "\n".join(lines) + "\n")
    return f"runs={folder / 'runs.yaml'}"


def test_all_runs_get_their_arguments_and_the_report_is_built(lab: Path, capsys) -> None:
    assert reproduce.main([write_runs(lab, "good", "good")]) == 0
    assert (lab / "seen").read_text() == f"-m a=1,2 results_dir={lab}\n" * 2
    output = capsys.readouterr().out
    assert "1/2 good" in output and "2/2 good" in output
    assert (lab / "tables" / "ruler.md").exists()


def test_results_dir_can_be_given(lab: Path) -> None:
    (lab / "other").mkdir()
    assert reproduce.main([write_runs(lab, "good"), f"results_dir={lab / 'other'}"]) == 0
    assert (lab / "other" / "seen").exists() and (lab / "other" / "tables").exists()


def test_a_failed_run_stops_nothing_and_fails_the_whole(lab: Path, capsys) -> None:
    assert reproduce.main([write_runs(lab, "bad", "good")]) == 1
    assert (lab / "seen").exists() and (lab / "tables").exists()
    assert "failed: bad -m a=1,2" in capsys.readouterr().out


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["terminal", "parent only"])
def test_ctrl_c_ends_with_130_and_keeps_what_is_done(lab: Path, send) -> None:
    command = [sys.executable, "-u", "-c", MAIN, write_runs(lab, "good", "slow", "bad")]
    # Tests that run in the background of a shell are told to ignore SIGINT, and would pass that on.
    heard = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **heard) as child:
        output = ""
        while "started" not in output:
            line = child.stdout.readline()
            assert line, output
            output += line
        send(child.pid, signal.SIGINT)
        output += child.stdout.read()
    assert child.returncode == 130
    assert "Finished points are kept" in output and "3/3" not in output
    assert (lab / "tables" / "ruler.md").exists()


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("results_dir: ", "result_dir: ", "runs, results_dir"),
        ("minutes: 1", "minutes: 0", "runs[0].minutes"),
        ("experiment: good", "experiment: god", "runs[0].experiment"),
        ("experiment: good", "experiment: '../x'", "runs[0].experiment"),
        ("[-m, 'a=1,2']", "[-m, 3]", "runs[0].overrides"),
        ("minutes: 1", "minute: 1", "runs[0]"),
        ("runs:\n", "runs: [\n", "YAML"),
        ("runs:\n", "needs: {gpus: 1}\nruns:\n", "needs"),
        ("runs:\n", "needs: {gpu_gib: 0}\nruns:\n", "needs"),
    ],
)
def test_a_wrong_list_is_one_clear_message(lab: Path, old: str, new: str, field: str, capsys) -> None:
    argument = write_runs(lab, "good")
    path = lab / "runs.yaml"
    path.write_text(path.read_text().replace(old, new))
    assert reproduce.main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and field in error
    assert not (lab / "seen").exists()


def test_a_missing_list_is_named() -> None:
    with pytest.raises(RunsError, match=r"nowhere\.yaml"):
        read_profile(Path("nowhere.yaml"))


def test_an_unknown_profile_names_the_known_ones(capsys) -> None:
    assert reproduce.main(["profile=tpu"]) == 2
    assert "field 'profile' is wrong; allowed: cpu, gpu, paper" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu", "paper"])
def test_without_a_gpu_a_gpu_profile_says_what_is_missing_and_runs_nothing(name: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(reproduce, "visible_gpus", list)
    monkeypatch.setattr(reproduce, "run_all", None)
    assert reproduce.main([f"profile={name}"]) == 2
    assert "an NVIDIA GPU is needed, with its driver and a PyTorch build with CUDA" in capsys.readouterr().err


def test_too_little_memory_is_named(monkeypatch) -> None:
    monkeypatch.setattr(reproduce, "visible_gpus", lambda: [Gpu("GPU-0", {"memory_mib": "24576"})])
    monkeypatch.setattr(reproduce, "available_host_bytes", lambda: 8 * 2**30)
    assert missing_hardware(Profile([], "x", gpu_gib=22, host_gib=8)) == []
    assert missing_hardware(Profile([], "x", gpu_gib=79, host_gib=100)) == [
        "79 GiB of GPU memory are needed, 24 are there",
        "100 GiB of free host memory are needed, 8 are there",
    ]


def test_the_checkpoint_of_a_profile_can_be_given() -> None:
    path = ROOT / PROFILES["gpu"]
    by_default, given = (read_profile(path, checkpoint).runs[-1].overrides for checkpoint in ("", "/data/model"))
    assert "model.source=Qwen/Qwen3-8B" in by_default and "model.source=/data/model" in given


@pytest.mark.parametrize(("name", "most"), [("cpu", 20), ("gpu", 30)])
def test_short_profiles_are_short(name: str, most: float) -> None:
    assert sum(run.minutes for run in read_profile(ROOT / PROFILES[name]).runs) <= most


def test_the_estimated_hours_come_before_the_first_run(lab: Path, capsys) -> None:
    argument = write_runs(lab, "good", "good")
    path = lab / "runs.yaml"
    path.write_text(path.read_text().replace("minutes: 1", "minutes: 90"))
    assert reproduce.main([argument]) == 0
    assert capsys.readouterr().out.startswith("2 runs, about 3.0 hours\n")
