"""A point is measured once; what is interrupted or fails is seen as such and done again."""

import errno
import fcntl
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dualdecoder.errors import CapacityError, CheckpointError, ConfigError, ContextError
from experiments.harness import points, sources
from experiments.harness.child import describe
from experiments.harness.environment import ROOT
from experiments.harness.isolate import Outcome
from experiments.harness.points import run_point
from experiments.harness.records import load_records, read_record


class Measure:
    """A measurement in this process that counts its calls and raises what it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls, self.error = 0, error

    def __call__(self, cfg: dict) -> list[dict]:
        self.calls += 1
        if self.error:
            raise self.error
        return [{"value": self.calls}]


def here(measure, cfg: dict) -> Outcome:
    """Instead of a child process, for what has nothing to do with processes."""
    try:
        return Outcome(measure(cfg))
    except Exception as error:
        return Outcome(error=describe(error))


def run_here(tmp_path: Path, measure=None, experiment: str = "toy", **changes) -> Path | None:
    return run_point(experiment, config(tmp_path, **changes), measure or Measure(), run=here)


def config(tmp_path: Path, **changes) -> DictConfig:
    return OmegaConf.create({"results_dir": str(tmp_path), "model": "tiny", "batch": 2, **changes})


def test_a_finished_point_is_neither_run_again_nor_overwritten(tmp_path: Path, capsys) -> None:
    measure = Measure()
    path = run_here(tmp_path, measure)
    before = path.read_bytes()
    assert run_here(tmp_path, measure) == path
    assert (measure.calls, path.read_bytes()) == (1, before)
    assert f"already recorded: {path}" in capsys.readouterr().out
    assert path.parent == tmp_path / "toy" and path.name.startswith("tiny-2-")


def test_config_and_environment_are_on_disk_before_the_measurement(tmp_path: Path) -> None:
    seen = []
    run_here(tmp_path, lambda cfg: seen.extend(load_records(tmp_path)[0]) or [])
    assert seen[0].status == "running"
    assert seen[0].config == {"model": "tiny", "batch": 2}
    assert seen[0].environment["code"]


def test_identity_is_the_config_without_the_output_keys(tmp_path: Path) -> None:
    first = run_here(tmp_path)
    elsewhere = run_here(tmp_path, results_dir=str(tmp_path / "other"))
    other = run_here(tmp_path, batch=3)
    assert first.name == elsewhere.name != other.name


def test_identity_changes_with_code_device_and_experiment(tmp_path: Path, gpu_environment, monkeypatch) -> None:
    env = points.environment()
    names = {run_here(tmp_path).name, run_here(tmp_path, experiment="play").name}
    for change in ({"code": "0" * 64}, {"gpu": gpu_environment["gpu"]}):
        monkeypatch.setattr(points, "environment", lambda change=change: {**env, **change})
        names.add(run_here(tmp_path).name)
    assert len(names) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_leaves_the_point_unfinished_and_it_is_done_again(tmp_path: Path, error) -> None:
    with pytest.raises(type(error)):
        run_here(tmp_path, Measure(error))
    assert [record.status for record in load_records(tmp_path)[0]] == ["running"]
    assert read_record(run_here(tmp_path)).status == "ok"
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_a_failure_is_recorded_and_tried_again_only_on_request(tmp_path: Path) -> None:
    secret = f"no such file: {ROOT}/conf/x.yaml and {Path.home()}/y"
    with pytest.raises(SystemExit, match=r"error: no such file: \./conf/x\.yaml and ~/y$"):
        run_here(tmp_path, Measure(OSError(secret)))
    record = load_records(tmp_path)[0][0]
    assert (record.status, record.error["type"], record.rows) == ("failed", "OSError", [])
    assert record.error["message"] == "no such file: ./conf/x.yaml and ~/y"
    assert 'File "tests/harness/test_points.py"' in record.error["traceback"]
    measure = Measure()
    with pytest.raises(SystemExit, match=r"no such file.*retry_failed=true tries again"):
        run_here(tmp_path, measure)
    assert measure.calls == 0
    assert read_record(run_here(tmp_path, measure, retry_failed=True)).status == "ok"
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.parametrize(
    "error", [CapacityError("too few bytes"), MemoryError(), torch.cuda.OutOfMemoryError("16 GiB")]
)
def test_too_little_memory_is_a_result_of_its_own(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(SystemExit):
        run_here(tmp_path, Measure(error))
    assert [record.status for record in load_records(tmp_path)[0]] == ["out_of_memory"]


@pytest.mark.parametrize(
    "error",
    [ConfigError("field=1\nis wrong"), CheckpointError("no such\nfile"), ContextError("9 tokens exceed\nthe context")],
)
def test_what_a_user_got_wrong_is_no_result_and_the_mended_command_simply_runs(tmp_path: Path, error) -> None:
    with pytest.raises(SystemExit, match=rf"^error: {' '.join(str(error).split())}$"):
        run_here(tmp_path, Measure(error))
    assert not list(tmp_path.rglob("*.json"))
    assert read_record(run_here(tmp_path)).status == "ok"


def test_a_failure_that_is_tried_again_with_a_wrong_setting_stays(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_here(tmp_path, Measure(OSError("the real one")))
    with pytest.raises(SystemExit):
        run_here(tmp_path, Measure(ConfigError("wrong")), retry_failed=True)
    assert [record.error["message"] for record in load_records(tmp_path)[0]] == ["the real one"]


def test_what_a_check_finds_starts_no_measurement(tmp_path: Path, capsys) -> None:
    def check(cfg: DictConfig) -> None:
        raise ConfigError(f"batch={cfg.batch} is wrong")

    measure = Measure()
    with pytest.raises(SystemExit, match=r"^error: batch=2 is wrong$"):
        run_point("toy", config(tmp_path), measure, run=here, check=check)
    assert measure.calls == 0 and not list(tmp_path.iterdir())
    assert run_point("toy", config(tmp_path, dry_run=True), measure, run=here, check=check) is None
    assert capsys.readouterr().out == "to do: python -m experiments.toy: cannot be measured: batch=2 is wrong\n"


@pytest.mark.parametrize(
    ("value", "words"),
    [("${nowhere}", "batch: Interpolation key 'nowhere' not found"), ("???", "batch: Missing mandatory value: batch")],
)
def test_a_config_that_cannot_be_resolved_is_one_line(tmp_path: Path, value: str, words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_here(tmp_path, batch=value)
    assert stopped.value.code == f"error: {words}"


def test_the_number_says_which_record_of_the_same_settings_is_newer(tmp_path: Path, monkeypatch) -> None:
    env = points.environment()
    for code in ("1", "2", "3"):
        monkeypatch.setattr(points, "environment", lambda code=code: {**env, "code": code * 64})
        run_here(tmp_path)
    run_here(tmp_path, batch=3)
    found = {(item.config["batch"], item.environment["code"][0]): item.number for item in load_records(tmp_path)[0]}
    assert found == {(2, "1"): 1, (2, "2"): 2, (2, "3"): 3, (3, "3"): 1}


METHOD = """
from baselines.full_kv import FullKV
from {package}helper import WINDOW

class Mine(FullKV):
    window = WINDOW
"""


@pytest.mark.parametrize("package", ["", "mine_pkg."])
@pytest.mark.parametrize("place", ["method", "methods"])
def test_identity_changes_with_the_source_of_a_method_from_elsewhere(
    tmp_path: Path, monkeypatch, package: str, place: str
) -> None:
    for module in ("mine", "helper", "mine_pkg", "mine_pkg.mine", "mine_pkg.helper"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    folder = tmp_path / package.rstrip(".")
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text("")
    (folder / "mine.py").write_text(METHOD.format(package=package))
    (folder / "helper.py").write_text("WINDOW = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    method = {"name": f"{package}mine:Mine", "options": {}}
    setting = {place: method if place == "method" else {"a": method}}
    names = [run_here(tmp_path / "results", **setting).name]
    for file in ("mine.py", "helper.py", "helper.py"):
        (folder / file).write_text((folder / file).read_text() + "# changed\n")
        names.append(run_here(tmp_path / "results", **setting).name)
    assert len(set(names)) == 4
    assert run_here(tmp_path / "results", **setting).name == names[-1]


def test_identity_changes_with_the_weights_of_a_checkpoint(tmp_path: Path, monkeypatch) -> None:
    content = {"id": "sha256:1"}
    monkeypatch.setattr(sources, "weights_id", lambda source: content["id"])
    model = {"name": "mine", "source": "somewhere"}
    before = run_here(tmp_path, model=model)
    content["id"] = "sha256:2"
    after = run_here(tmp_path, model=model)
    assert before.name != after.name
    assert [read_record(path).environment["weights"] for path in (before, after)] == ["sha256:1", "sha256:2"]
    # Nothing is read where nothing is loaded.
    shapes = [
        run_point("toy", config(tmp_path, model=model, batch=3), Measure(), run=here, weights=False),
        run_here(tmp_path, model={"name": "tiny", "source": "random:tiny"}),
    ]
    assert [read_record(path).environment["weights"] for path in shapes] == [None, None]


def test_rows_that_cannot_be_recorded_are_a_failure(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"rows\[0\]\.task"):
        run_here(tmp_path, experiment="ruler")
    assert load_records(tmp_path)[0][0].status == "failed"


def test_a_dry_run_measures_nothing_and_says_what_it_would_cost(tmp_path: Path, capsys) -> None:
    run_here(tmp_path, Measure())
    shape = {"name": "small", "shape": "smollm2-135m", "dtype": "float32"}
    planned = {"model": shape, "method": {"name": "full_kv", "options": {}}, "context": 4096}
    for changes in ({}, {"batch": 3}, planned):
        measure = Measure()
        assert run_here(tmp_path, measure, dry_run=True, **changes) is None and measure.calls == 0
    recorded, to_do, with_plan = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"recorded, ok: python -m experiments\.toy: about \d+ s, memory unknown", recorded)
    assert to_do.startswith("to do: ")
    # 30 layers, K and V of 4,096 tokens for 3 heads of 64, 2 sequences, 4 bytes: 0.35 GiB; 134.5 M weights: 0.50 GiB.
    assert 0.85 <= float(re.search(r", ([\d.]+) GiB planned", with_plan)[1]) < 0.88
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_a_truncated_record_is_measured_again(tmp_path: Path) -> None:
    path = run_here(tmp_path)
    path.write_text(path.read_text()[:40])
    assert read_record(run_here(tmp_path)).status == "ok"


def test_the_first_of_two_processes_wins_where_files_cannot_be_locked(tmp_path: Path, monkeypatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    def slower(cfg: DictConfig) -> list[dict]:
        run_here(tmp_path, lambda cfg: [{"value": "first"}])
        return [{"value": "second"}]

    assert read_record(run_here(tmp_path, slower)).rows == [{"value": "first"}]


def test_no_record_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    checkpoint = f"{ROOT}/models/tiny.gguf"
    seen = []
    path = run_here(tmp_path, lambda cfg: seen.append(cfg["checkpoint"]) or [], checkpoint=checkpoint)
    with pytest.raises(SystemExit):
        run_here(tmp_path, Measure(ValueError(checkpoint)), checkpoint=checkpoint, batch=3)
    for written in tmp_path.rglob("*.json"):
        text = written.read_text()
        assert str(ROOT) not in text and str(Path.home()) not in text and str(tmp_path) not in text
    assert read_record(path).config["checkpoint"] == "./models/tiny.gguf"
    # The measurement itself needs the real one.
    assert seen == [checkpoint]


def test_times_are_utc_and_seconds_are_of_the_measurement(tmp_path: Path) -> None:
    begin = time.perf_counter()
    record = read_record(run_here(tmp_path, lambda cfg: time.sleep(0.05) or []))
    assert record.started.endswith("+00:00") and record.finished >= record.started
    assert 0.05 <= record.seconds <= time.perf_counter() - begin


def test_points_in_one_process_say_so(tmp_path: Path) -> None:
    pids = []

    def measure(cfg: DictConfig) -> list[dict]:
        pids.append(os.getpid())
        return [{"value": cfg.batch}]

    path = run_point("toy", config(tmp_path, fresh_process=False), measure)
    assert pids == [os.getpid()]
    record = read_record(path)
    assert record.rows == [{"value": 2}]
    assert record.environment["launcher"].endswith("points in one process")
    assert "fresh_process" not in record.config
