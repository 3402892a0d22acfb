"""A point is measured once; what is interrupted or fails is seen as such and done again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.harness import points
from experiments.harness.environment import ROOT
from experiments.harness.points import run_point
from experiments.harness.records import load_records, read_record

SLOW_POINT = """
import sys, time
from omegaconf import OmegaConf
from experiments.harness.points import run_point
def measure(cfg):
    print("measuring", flush=True)
    time.sleep(60)
run_point("toy", OmegaConf.create({"results_dir": sys.argv[1], "model": "tiny", "batch": 2}), measure)
"""


class Measure:
    """A measurement that counts its calls and raises what it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls, self.error = 0, error

    def __call__(self, cfg: DictConfig) -> list[dict]:
        self.calls += 1
        if self.error:
            raise self.error
        return [{"value": self.calls}]


def config(tmp_path: Path, **changes) -> DictConfig:
    return OmegaConf.create({"results_dir": str(tmp_path), "model": "tiny", "batch": 2, **changes})


def test_a_finished_point_is_neither_run_again_nor_overwritten(tmp_path: Path, capsys) -> None:
    measure = Measure()
    path = run_point("toy", config(tmp_path), measure)
    before = path.read_bytes()
    assert run_point("toy", config(tmp_path), measure) == path
    assert (measure.calls, path.read_bytes()) == (1, before)
    assert f"already recorded: {path}" in capsys.readouterr().out
    assert path.parent == tmp_path / "toy" and path.name.startswith("tiny-2-")


def test_config_and_environment_are_on_disk_before_the_measurement(tmp_path: Path) -> None:
    seen = []
    run_point("toy", config(tmp_path), lambda cfg: seen.extend(load_records(tmp_path)[0]) or [])
    assert seen[0].status == "running"
    assert seen[0].config == {"model": "tiny", "batch": 2}
    assert seen[0].environment["code"]


def test_identity_is_the_config_without_the_output_keys(tmp_path: Path) -> None:
    first = run_point("toy", config(tmp_path), Measure())
    elsewhere = run_point("toy", config(tmp_path, results_dir=str(tmp_path / "other")), Measure())
    other = run_point("toy", config(tmp_path, batch=3), Measure())
    assert first.name == elsewhere.name != other.name


def test_identity_changes_with_code_device_and_experiment(tmp_path: Path, monkeypatch) -> None:
    env = points.environment()
    names = {run_point("toy", config(tmp_path), Measure()).name, run_point("play", config(tmp_path), Measure()).name}
    for change in ({"code": "0" * 64}, {"gpu": [{"name": "NVIDIA H200"}]}):
        monkeypatch.setattr(points, "environment", lambda change=change: {**env, **change})
        names.add(run_point("toy", config(tmp_path), Measure()).name)
    assert len(names) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_leaves_the_point_unfinished_and_it_is_done_again(tmp_path: Path, error) -> None:
    with pytest.raises(type(error)):
        run_point("toy", config(tmp_path), Measure(error))
    assert [record.status for record in load_records(tmp_path)[0]] == ["running"]
    assert read_record(run_point("toy", config(tmp_path), Measure())).status == "ok"
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_a_failure_is_recorded_raised_and_replaced(tmp_path: Path) -> None:
    secret = f"no such file: {ROOT}/conf/x.yaml and {Path.home()}/y"
    with pytest.raises(OSError, match="no such file"):
        run_point("toy", config(tmp_path), Measure(OSError(secret)))
    record = load_records(tmp_path)[0][0]
    assert (record.status, record.error["type"], record.rows) == ("failed", "OSError", [])
    assert record.error["message"] == "no such file: ./conf/x.yaml and ~/y"
    assert 'File "tests/harness/test_points.py"' in record.error["traceback"]
    assert read_record(run_point("toy", config(tmp_path), Measure())).status == "ok"


def test_rows_that_cannot_be_recorded_are_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\[0\]\.task"):
        run_point("ruler", config(tmp_path), Measure())
    assert load_records(tmp_path)[0][0].status == "failed"


def test_a_truncated_record_is_measured_again(tmp_path: Path) -> None:
    path = run_point("toy", config(tmp_path), Measure())
    path.write_text(path.read_text()[:40])
    assert read_record(run_point("toy", config(tmp_path), Measure())).status == "ok"


def test_the_first_of_two_processes_wins(tmp_path: Path) -> None:
    def slower(cfg: DictConfig) -> list[dict]:
        run_point("toy", config(tmp_path), lambda cfg: [{"value": "first"}])
        return [{"value": "second"}]

    assert read_record(run_point("toy", config(tmp_path), slower)).rows == [{"value": "first"}]


def test_no_record_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    checkpoint = f"{ROOT}/models/tiny.gguf"
    paths = [run_point("toy", config(tmp_path, checkpoint=checkpoint), Measure())]
    with pytest.raises(ValueError):
        run_point("toy", config(tmp_path, checkpoint=checkpoint, batch=3), Measure(ValueError(checkpoint)))
    for path in paths + list(tmp_path.rglob("*.json")):
        text = path.read_text()
        assert str(ROOT) not in text and str(Path.home()) not in text and str(tmp_path) not in text
    assert read_record(paths[0]).config["checkpoint"] == "./models/tiny.gguf"


def test_a_killed_process_leaves_no_finished_record_and_the_point_is_done_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW_POINT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "measuring\n"
        os.kill(child.pid, signal.SIGKILL)
    records, errors = load_records(tmp_path)
    assert ([record.status for record in records], errors) == (["running"], [])
    path = run_point("toy", config(tmp_path), Measure())
    assert list(tmp_path.rglob("*.json")) == [path]
    assert read_record(path).status == "ok"


def test_the_command_of_a_sweep_job_measures_that_job_alone(tmp_path: Path) -> None:
    module = tmp_path / "sweep.py"
    module.write_text(
        "import hydra\nfrom experiments.harness.points import run_point\n"
        "@hydra.main(version_base='1.3', config_path='.', config_name='toy')\n"
        "def main(cfg): run_point('toy', cfg, lambda cfg: [])\nmain()\n"
    )
    (tmp_path / "toy.yaml").write_text(f"batch: 1\nresults_dir: {tmp_path / 'out'}\n")
    overrides = ["-m", "batch=1,2", f"results_dir={tmp_path / 'out2'}", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, module, *overrides], env=environment, check=True, capture_output=True)
    commands = sorted(record.command for record in load_records(tmp_path / "out2")[0])
    assert commands == ["python -m experiments.toy batch=1", "python -m experiments.toy batch=2"]


def test_times_are_utc_and_seconds_are_of_the_measurement(tmp_path: Path) -> None:
    record = read_record(run_point("toy", config(tmp_path), lambda cfg: time.sleep(0.05) or []))
    assert record.started.endswith("+00:00") and record.finished >= record.started
    assert 0.05 <= record.seconds < 5
