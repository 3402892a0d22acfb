"""The environment is complete without a GPU, right with one, and names no person or folder."""

import getpass
import json
import socket
from pathlib import Path

import pytest
import torch

from experiments.harness import environment as module
from experiments.harness.environment import ROOT, code_hash, device_tag, environment

SMI = """#!/bin/sh
echo "0, GPU-aaaa, 00000000:0F:00.0, NVIDIA H200, 143771, 580.1, 5, 16, 1980, 3201, 700.00"
echo "1, GPU-bbbb, 00000000:1F:00.0, NVIDIA L4, 23034, 580.1, 4, 16, 300, 405, 72.00"
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch) -> None:
    """A machine on which nvidia-smi lists an H200 and an L4."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    env = environment()
    assert env["gpu"] is None and device_tag(env) == "cpu"
    assert env["torch"] and env["python"] and env["cpu"] and env["host_ram_bytes"] > 2**30
    assert len(env["code"]) == 64 and len(env["lock"]) == 64


def test_no_nvidia_smi_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", "/nowhere")
    env = environment()
    assert (env["gpu"], env["commit"], env["dirty"]) == (None, None, None)


def test_gpus_are_recorded(two_gpus) -> None:
    env = environment()
    assert device_tag(env) == "NVIDIA H200"
    assert env["gpu"][1] == {
        "name": "NVIDIA L4",
        "memory_mib": "23034",
        "driver": "580.1",
        "pcie_generation": "4",
        "pcie_width": "16",
        "sm_clock_mhz": "300",
        "memory_clock_mhz": "405",
        "power_limit_w": "72.00",
        "cuda": "13.0",
        "numa_node": None,
    }


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["NVIDIA L4"]), ("GPU-aa", ["NVIDIA H200"]), ("0,1", ["NVIDIA H200", "NVIDIA L4"]), ("", None)],
)
def test_only_the_gpus_of_this_process_count(two_gpus, monkeypatch, visible: str, names) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = environment()["gpu"]
    assert (gpus and [gpu["name"] for gpu in gpus]) == names


def test_commit_and_dirty_flag_can_be_given(monkeypatch) -> None:
    monkeypatch.setenv("DUALDECODER_COMMIT", "abc")
    monkeypatch.setenv("DUALDECODER_DIRTY", "1")
    assert (environment()["commit"], environment()["dirty"]) == ("abc", True)
    monkeypatch.setenv("DUALDECODER_DIRTY", "perhaps")
    with pytest.raises(ValueError, match="DUALDECODER_DIRTY is 'perhaps'; allowed: 0, 1"):
        environment()


def test_a_repository_around_a_copy_does_not_answer_for_it(tmp_path: Path, monkeypatch) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    module._output(["git", "init", str(tmp_path)])
    monkeypatch.setattr(module, "ROOT", copy)
    monkeypatch.delenv("DUALDECODER_DIRTY", raising=False)
    assert module._commit()["dirty"] is None


def test_code_hash_follows_what_measures_and_not_what_reports(tmp_path: Path) -> None:
    for name in ("dualdecoder/a.py", "experiments/report.py", "experiments/reporting/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    code_hash.cache_clear()
    before = code_hash(tmp_path)
    (tmp_path / "experiments/report.py").write_text("2")
    (tmp_path / "experiments/reporting/b.py").write_text("2")
    code_hash.cache_clear()
    assert code_hash(tmp_path) == before
    (tmp_path / "dualdecoder/a.py").write_text("2")
    code_hash.cache_clear()
    assert code_hash(tmp_path) != before


def test_nothing_personal_is_recorded() -> None:
    values = json.dumps(environment())
    for secret in (str(ROOT), str(Path.home()), socket.gethostname()):
        assert secret not in values
    assert f'"{getpass.getuser()}"' not in values
