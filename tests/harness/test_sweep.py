"""Sweeps as a user runs them: real processes that are killed, die, run out of memory, and are taken up again."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from experiments.harness import devices
from experiments.harness.child import ORPHANED, load_measure
from experiments.harness.devices import Slot, one_gpu
from experiments.harness.environment import ROOT, Gpu
from experiments.harness.isolate import measure_in_child
from experiments.harness.records import load_records

# An experiment outside the repository. Every start of a measurement leaves a line in the file `log`.
TOY = """
import os, signal, sys
import hydra
from experiments.harness.points import run_point
from experiments.reporting.terminal import show_point

def measure(cfg):
    with open(cfg.log, "a") as log:
        log.write(f"{cfg.batch} {os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
    if cfg.batch == cfg.hang:
        signal.pause()
    if cfg.batch == 91:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.batch == 92:
        raise MemoryError("no room for 92")
    if cfg.batch == 93:
        os._exit(7)
    return [{"value": cfg.batch}]

@hydra.main(version_base="1.3", config_path=".", config_name="toy")
def main(cfg):
    show_point(run_point("toy", cfg, measure))

if __name__ == "__main__":
    main()
"""

# A measurement that lasts until two of them are under way.
MEET = """
import os, time
from pathlib import Path

def measure(cfg):
    Path("{folder}", f"here-{{os.getpid()}}").touch()
    while len(list(Path("{folder}").glob("here-*"))) < 2:
        time.sleep(0.05)
    return [dict(os.environ)]
"""


class Lab:
    """A folder with the experiment and its results."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results, self.log = folder, folder / "results", folder / "log"
        (folder / "toy.py").write_text(TOY)
        text = f"batch: 1\nhang: 0\nlog: {self.log}\nretry_failed: false\nresults_dir: {self.results}\n"
        (folder / "toy.yaml").write_text(text + f"hydra: {{sweep: {{dir: {folder}/sweep}}}}\n")

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.folder / "toy.py"), "-m", *overrides]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, preexec_fn=hear_interrupts, **pipes
        )

    def run(self, *overrides: str) -> tuple[int, str]:
        with self.start(*overrides) as sweep:
            output, errors = sweep.communicate()
        return sweep.returncode, output + errors

    def started(self) -> list[int]:
        """The batch of every measurement that was started, in order."""
        return [int(line.split()[0]) for line in self._lines()]

    def processes(self) -> list[int]:
        return [int(line.split()[1]) for line in self._lines()]

    def statuses(self) -> dict[int, str]:
        records, errors = load_records(self.results)
        assert not errors
        return {record.config["batch"]: record.status for record in records}

    def replace(self, old: str, new: str) -> None:
        file = self.folder / "toy.py"
        file.write_text(file.read_text().replace(old, new))

    def wait_for(self, batch: int, times: int, sweep: subprocess.Popen[str]) -> None:
        while self.started().count(batch) < times:
            assert sweep.poll() is None, sweep.communicate()
            time.sleep(0.05)

    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def hear_interrupts() -> None:
    """Tests that run in the background of a shell are told to ignore SIGINT, and would pass that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def wait_until_gone(process: int) -> None:
    """If it stays, this test hangs, and is ended for that."""
    while psutil.pid_exists(process):
        time.sleep(0.05)


def test_a_sweep_ended_in_the_middle_goes_on_after_its_finished_points(lab: Lab) -> None:
    for how in (signal.SIGINT, signal.SIGKILL):
        with lab.start("batch=1,2,3", "hang=2") as sweep:
            lab.wait_for(2, times=1 if how == signal.SIGINT else 2, sweep=sweep)
            sweep.send_signal(how)
            sweep.communicate()
        # The child does not outlive the sweep: it would still hold its GPU.
        wait_until_gone(lab.processes()[-1])
        assert lab.statuses() == {1: "ok", 2: "running"}
    (first,) = (path for path in lab.results.rglob("*.json") if '"ok"' in path.read_text())
    before = first.read_bytes()
    # The same config, now without a hanging point: what is measured is not part of a toy's identity.
    lab.replace("signal.pause()", "pass")
    code, output = lab.run("batch=1,2,3", "hang=2")
    assert (code, output.count("already recorded")) == (0, 1)
    assert lab.statuses() == {1: "ok", 2: "ok", 3: "ok"}
    assert lab.started() == [1, 2, 2, 2, 3] and len(set(lab.processes())) == 5
    assert [path.suffix for path in lab.results.rglob("*") if path.is_file()] == [".json"] * 3
    assert first.read_bytes() == before


def test_a_child_that_dies_or_has_no_memory_is_recorded_and_the_sweep_goes_on(lab: Lab) -> None:
    code, output = lab.run("batch=91,92,93,4")
    assert code == 1
    assert lab.statuses() == {91: "failed", 92: "out_of_memory", 93: "failed", 4: "ok"}
    errors = {record.config["batch"]: record.error for record in load_records(lab.results)[0]}
    assert "SIGKILL" in errors[91]["message"] and errors[91]["exit"] == -9
    assert errors[91]["traceback"] == "last words\n" and "last words" in output
    assert "exit status 7" in errors[93]["message"] and errors[92]["message"] == "no room for 92"
    # Once more: nothing is tried again unasked, and the sweep still has points without a result.
    assert lab.run("batch=91,92,93,4")[0] == 1
    assert len(lab.started()) == 4
    assert lab.run("batch=92", "retry_failed=true")[0] == 1
    assert lab.started() == [91, 92, 93, 4, 92]


@pytest.mark.parametrize("launcher", ["joblib", pytest.param("submitit_local", marks=pytest.mark.slow)])
def test_local_launchers_run_every_point_in_its_own_process(lab: Lab, launcher: str) -> None:
    jobs = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    code, output = lab.run("batch=1,2", "hang=0", f"hydra/launcher={launcher}", *jobs)
    assert code == 0, output
    assert lab.statuses() == {1: "ok", 2: "ok"} and len(set(lab.processes())) == 2
    records, _ = load_records(lab.results)
    # Alone, the command in the record measures that point.
    assert {record.command for record in records} == {f"python -m experiments.toy batch={n} hang=0" for n in (1, 2)}
    if jobs:
        assert {record.environment["launcher"] for record in records} == {"JoblibLauncher, 2 at once"}


def test_an_orphaned_child_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import signal\ndef measure(cfg):\n    signal.pause()\n")
    request = f'{{"file": "{tmp_path}/slow.py", "function": "measure", "config": {{}}}}\n'
    command = [sys.executable, "-m", "experiments.harness.child", str(tmp_path / "outcome.json")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True) as child:
        child.stdin.write(request)
        child.stdin.close()
        assert child.wait() == ORPHANED
    assert not (tmp_path / "outcome.json").exists()


def test_a_gpu_belongs_to_one_point_at_a_time(tmp_path: Path, monkeypatch) -> None:
    gpus = [Gpu(f"GPU-{n}", {"name": name}) for n, name in enumerate(("A", "A", "B"))]
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(devices.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(devices.time, "sleep", lambda seconds: (_ for _ in ()).throw(TimeoutError))
    with one_gpu() as first, one_gpu() as second:
        assert [first.gpu.uuid, second.gpu.uuid] == ["GPU-0", "GPU-1"]
        # The third is of another kind: its numbers would not belong with the others.
        with pytest.raises(TimeoutError), one_gpu():
            pass
    with one_gpu() as third:
        assert third.gpu.uuid == "GPU-0"


def test_without_a_gpu_there_is_nothing_to_wait_for(monkeypatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", list)
    with one_gpu() as slot:
        assert slot == Slot()


def test_points_at_the_same_time_see_different_gpus(tmp_path: Path, monkeypatch) -> None:
    names = [f"GPU-{os.getpid()}-{n}" for n in (0, 1)]
    monkeypatch.setattr(devices, "visible_gpus", lambda: [Gpu(name, {"name": "A"}) for name in names])
    (tmp_path / "look.py").write_text(MEET.format(folder=tmp_path))
    measure = load_measure(tmp_path / "look.py", "measure")
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: measure_in_child(measure, {}), range(2)))
    assert sorted(outcome.rows[0]["CUDA_VISIBLE_DEVICES"] for outcome in outcomes) == names
    assert [outcome.gpu for outcome in outcomes] == [{"name": "A"}] * 2
