"""A method of another package by its dotted path, in every experiment that takes methods."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from dualdecoder.method import method_config
from experiments import residency
from experiments.harness.environment import ROOT
from experiments.harness.records import load_records
from experiments.harness.workload import with_methods

MINE = "my_package.my_module:MyMethod"
MODULE = """
from dataclasses import dataclass
from baselines.full_kv import FullKV
from dualdecoder.config import MethodConfig

@dataclass(frozen=True)
class MyConfig(MethodConfig):
    window: int = 8

class MyMethod(FullKV):
    config_class = MyConfig
"""
# The experiments with one method, and those with a list of them.
ONE, SEVERAL = ("throughput", "method_time", "lm_eval"), ("residency", "ruler", "fidelity")


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "my_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def config(name: str, *overrides: str):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, list(overrides))


@pytest.mark.parametrize("experiment", ONE)
def test_as_the_method_of_an_experiment(package: Path, experiment: str) -> None:
    cfg = config(experiment, f"method={MINE}", "+method.options.window=64")
    assert cfg.method == {"name": MINE, "options": {"window": 64}}
    assert method_config(cfg.method.name, OmegaConf.to_container(cfg.method.options)).window == 64


@pytest.mark.parametrize("experiment", SEVERAL)
def test_instead_of_a_list_of_methods(package: Path, experiment: str) -> None:
    for name in (MINE, "quest"):
        cfg = with_methods(config(experiment, f"method={name}"))
        assert [(label, item.name) for label, item in cfg.methods.items()] == [(name, name)] and "method" not in cfg
        OmegaConf.resolve(cfg)


def test_beside_the_others() -> None:
    assert "dualdecoder" in config("residency", f"+method@methods.mine={MINE}").methods
    assert MINE in with_methods(config("ruler", f"methods=[full_kv,'{MINE}']")).methods


def test_without_a_method_nothing_changes() -> None:
    for experiment in SEVERAL:
        cfg = with_methods(config(experiment))
        assert "method" not in cfg and "dualdecoder" in cfg.methods


@pytest.mark.parametrize("name", ["mine", "my_package.MyMethod", "a.b:", ":C", "a..b:C", "a/b:C"])
def test_other_names_are_still_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(MissingConfigException, match="Available options in 'method':\n\tdualdecoder"):
        config("throughput", f"method={name}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("residency", "model=tiny", "context=1024,2048", f"method={MINE}"),
        ("throughput", "model=smollm2", "context=64,80", "budget=32", "steps=2", "warmup=1", f"method={MINE}"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_it_is_measured(package: Path, arguments: tuple[str, ...]) -> None:
    """In a sweep, and with the package where the command is started."""
    name, *overrides = arguments
    folders = [f"results_dir={package}/results", f"hydra.sweep.dir={package}/hydra"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"experiments.{name}", "-m", *overrides, *folders]
    result = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    records, errors = load_records(package / "results")
    assert not errors and [record.status for record in records] == ["ok"] * 2
    assert {row["method"] for record in records for row in record.rows} == {MINE} | (
        {residency.IDEAL} if name == "residency" else set()
    )
