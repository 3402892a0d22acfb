"""A results folder is tried before a measurement, belongs to one process a point, and loses no measured row."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.harness import records, saving
from experiments.harness.environment import ROOT
from experiments.harness.isolate import Outcome
from experiments.harness.points import run_point
from experiments.harness.records import load_records, read_record
from experiments.harness.saving import NotSavedError, keep_rows, only_one, save_measured


def run_here(results: Path, rows: list[dict], calls: list[int] | None = None, **changes) -> Path | None:
    def run(measure, cfg: dict) -> Outcome:
        (calls if calls is not None else []).append(1)
        return Outcome(rows)

    cfg = OmegaConf.create({"results_dir": str(results), "batch": 1, **changes})
    return run_point("toy", cfg, lambda cfg: rows, run=run)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_absent_folder_is_made(tmp_path: Path) -> None:
    path = run_here(tmp_path / "a" / "b", [{"value": 1}])
    assert read_record(path).rows == [{"value": 1}]
    assert [item.name for item in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("results_dir", ["", " ", None, 7])
def test_a_results_folder_that_is_none_is_named(results_dir) -> None:
    calls: list[int] = []
    cfg = OmegaConf.create({"results_dir": results_dir, "batch": 1})
    with pytest.raises(SystemExit, match=r"^error: results_dir=.* is not allowed; allowed: a folder$"):
        run_point("toy", cfg, lambda cfg: [], run=lambda *_: Outcome(calls.append(1) or []))
    assert not calls


def test_a_file_in_the_place_of_the_folder_is_found_before_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    calls: list[int] = []
    with pytest.raises(
        SystemExit, match=r"^error: results_dir: .*results/toy cannot be written: Not a directory; allowed"
    ):
        run_here(tmp_path / "results", [], calls)
    assert not calls


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a folder that nobody can write to")
def test_a_read_only_folder_is_found_before_a_measurement() -> None:
    """/proc takes no new folder, not even root's."""
    calls: list[int] = []
    with pytest.raises(SystemExit, match=r"^error: results_dir: /proc/toy cannot be written: "):
        run_here(Path("/proc"), [], calls)
    assert not calls


def test_a_full_disk_is_found_before_a_measurement(tmp_path: Path, monkeypatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(saving.os, "fsync", full)
    with pytest.raises(
        SystemExit, match=r"^error: results_dir: .* cannot be written: No space left on device; allowed"
    ):
        run_here(tmp_path, [], calls)
    assert not calls and not list(tmp_path.rglob("*.*"))


def test_a_limit_on_the_size_of_files_is_found_before_a_measurement(tmp_path: Path) -> None:
    """The system's own refusal instead of a made-up one: files of at most 64 KiB."""
    script = (
        "from pathlib import Path; import sys; sys.path.insert(0, 'tests/harness')\n"
        "from test_saving import run_here\n"
        f"run_here(Path({str(tmp_path)!r}), [])\n"
    )
    limit = (1 << 16, 1 << 16)
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1), result.stderr
    assert "cannot be written: File too large" in result.stderr


def test_a_disk_that_has_become_full_loses_no_measured_row(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(saving.tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    results = tmp_path / "results"
    replace = os.replace
    written: list[str] = []

    def fills(source: str, target: str) -> None:
        # The first is the record of the beginning.
        written.append(str(target))
        return replace(source, target) if len(written) == 1 else full()

    monkeypatch.setattr(records.os, "replace", fills)
    with pytest.raises(SystemExit, match=r"No space left on device; what was measured is kept as .*elsewhere.*json;"):
        run_here(results, [{"value": 7}])
    assert load_records(results)[0][0].status == "running"
    (kept,) = (tmp_path / "elsewhere").rglob("*.json")
    assert read_record(kept).rows == [{"value": 7}] and read_record(kept).status == "ok"
    monkeypatch.undo()
    # Moved to where it belongs, it is the point's record.
    (unfinished,) = results.rglob("*.json")
    os.replace(kept, unfinished)
    calls: list[int] = []
    assert run_here(results, [], calls) == unfinished and not calls


def test_with_no_room_anywhere_the_rows_are_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    path = run_here(tmp_path, [{"value": 7}])
    record = read_record(path)
    monkeypatch.setattr(saving, "write_record", full)
    monkeypatch.setattr(saving.tempfile, "mkdtemp", full)
    with pytest.raises(NotSavedError, match=r"what was measured is printed above"):
        save_measured(path, record)
    printed = capsys.readouterr().out
    assert json.loads(printed)["rows"] == [{"value": 7}]


def test_rows_that_no_record_can_hold_are_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(saving.tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(SystemExit):
        run_here(tmp_path / "results", [{"value": float("nan"), "seconds": 3.5}])
    assert load_records(tmp_path / "results")[0][0].status == "failed"
    (kept,) = (tmp_path / "elsewhere").rglob("*.json")
    assert f"rows that cannot be recorded: kept as {kept}" in capsys.readouterr().out
    assert json.loads(kept.read_text())[0]["seconds"] == 3.5
    assert keep_rows("b.json", [{}]).startswith("kept as ")


HOLDER = """
import sys, time
from pathlib import Path
from experiments.harness.saving import only_one
with only_one(Path(sys.argv[1]), lambda: print("waits", flush=True)):
    print("holds", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(path: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(path), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_lock_is_waited_for_and_a_killed_process_holds_none(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with hold(path, 600) as first:
        assert first.stdout.readline() == "holds\n"
        with hold(path, 0) as second:
            assert second.stdout.readline() == "waits\n"
            assert second.poll() is None
            first.send_signal(signal.SIGKILL)
            assert second.stdout.readline() == "holds\n"
            assert second.wait() == 0
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_while_it_was_waited_for_is_no_lock(tmp_path: Path) -> None:
    """The holder removes its file at the end: who waited must not hold that one while another holds a new one."""
    path = tmp_path / "a.json"
    with hold(path, 0.5) as first:
        assert first.stdout.readline() == "holds\n"
        with only_one(path, lambda: None), (tmp_path / ".a.json.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_two_sweeps_in_one_folder_measure_no_point_twice(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "import sys, time\n"
        "from omegaconf import OmegaConf\n"
        "from experiments.harness.points import run_point\n"
        "def measure(cfg):\n"
        "    open(cfg.log, 'a').write(f'{cfg.batch}\\n')\n"
        "    time.sleep(1)\n"
        "    return [{'value': cfg.batch}]\n"
        "if __name__ == '__main__':\n"
        "    for batch in (1, 2):\n"
        "        cfg = {'results_dir': sys.argv[1], 'log': sys.argv[2], 'batch': batch, 'fresh_process': False}\n"
        "        run_point('twice', OmegaConf.create(cfg), measure)\n"
    )
    command = [sys.executable, str(tmp_path / "twice.py"), str(tmp_path / "results"), str(tmp_path / "log")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    sweeps = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) for _ in range(2)]
    outputs = [sweep.communicate() for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], outputs
    assert sorted((tmp_path / "log").read_text().split()) == ["1", "2"]
    assert sum(output.count("already recorded") for output, _ in outputs) == 2
    assert [path.suffix for path in (tmp_path / "results").rglob("*") if path.is_file()] == [".json"] * 2
