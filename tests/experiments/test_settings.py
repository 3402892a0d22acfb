"""What a user can get wrong is found before a process is started, and a model is called by its own name."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dualdecoder.errors import ConfigError, UserError
from experiments import residency, throughput
from experiments.harness import checks, points, workload
from experiments.harness.model_names import model_name, shape_in
from experiments.harness.points import run_point
from experiments.harness.records import read_record
from experiments.harness.rows import row_problem

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
    "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32",
}  # fmt: skip


def config(name: str, *overrides: str):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, list(overrides))


def prepared(name: str, *overrides: str):
    cfg = config(name, *overrides)
    return workload.with_methods(cfg) if name in ("ruler", "fidelity") else cfg


@pytest.fixture
def a_gpu(monkeypatch) -> None:
    """What is wrong beside the missing GPU."""
    monkeypatch.setattr(checks, "visible_gpus", lambda: ["one"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder with a config and no weights."""
    place = tmp_path / "run7" / "final"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(SMALL))
    return place


WRONG = [
    ("throughput", "batch=true", "batch=True"),
    ("throughput", "batch=1.5", "batch=1.5"),
    ("throughput", "context=[64]", "context="),
    ("throughput", "context=8190", "context=8190 is not allowed; allowed: at most"),
    ("throughput", "model.dtype=float8", "dtype='float8'"),
    ("throughput", "+method.options.bogus=1", "option bogus of method dualdecoder"),
    ("throughput", "method.name=nope", "method='nope'"),
    ("throughput", "method.name=7", "method=7"),
    ("throughput", "model.shape=tiny", "model.shape='tiny'"),
    ("prediction", "context=39", "context=39 is not allowed; allowed: at least 40 tokens"),
    ("prediction", "capacities=[]", "capacities=.. is not allowed"),
    ("prediction", "capacities=[1,.nan]", "capacities="),
    ("prediction", "speculations=[self,none]", "speculations="),
    ("ruler", "task=nope", "nope"),
    ("ruler", "methods=full_kv", "methods='full_kv'"),
    ("ruler", "device=gpu", "device='gpu'"),
    ("ruler", "dtype=half", "dtype='half'"),
    ("ruler", "data.squad=nowhere.json", "data.squad='nowhere.json' is not a file"),
    ("fidelity", "budgets=[0]", "budgets="),
    ("fidelity", "budgets=[7]", "budget=7"),
    ("fidelity", "context=8190", "context=8190"),
    ("lm_eval", "tasks=[nope]", "tasks=.'nope'. is not allowed"),
    ("lm_eval", "tasks=ruler_nv", "tasks='ruler_nv'"),
    ("lm_eval", "batch=0", "batch=0"),
    ("lm_eval", "limit=0", "limit=0"),
    ("lm_eval", "fewshot=-1", "fewshot=-1"),
    ("lm_eval", "include=nowhere", "include='nowhere'"),
    ("residency", "hardware.gpu_budget_gib=inf", "hardware.gpu_budget_gib=inf"),
    ("residency", "hardware.gpu_budget_gib=0", "hardware.gpu_budget_gib=0"),
    ("residency", "model.source=random:nope", "model shape 'nope'"),
    ("step_time", "reuse=2", "reuse=2"),
    ("step_time", "context=512", "context=512 is not allowed; allowed: at least"),
    ("step_time", "seed=x", "seed='x'"),
    ("method_time", "accuracy=-1", "accuracy=-1"),
    ("method_time", "host_sequences=-1", "host_sequences=-1"),
    ("method_time", "context=2048", "context=2048 is not allowed; allowed: at least"),
    ("method_time", "warmup=0", "warmup=0"),
    ("attention_time", "context=1", "context=1"),
    ("attention_time", "tunings=[[64,4]]", "tunings="),
    ("kernel_time", "batches=[]", "batches=.. is not allowed"),
    ("kernel_time", "batches=[0]", "batches=.0. is not allowed"),
    ("prefill_time", "context=64", "context=64"),
    ("prefill_time", "budget=7", "budget=7"),
]  # fmt: skip


@pytest.mark.parametrize(("experiment", "override", "words"), WRONG)
def test_a_wrong_setting_is_named_without_a_model(a_gpu, monkeypatch, experiment: str, override: str, words) -> None:
    """The parent's check alone: whatever reads weights is out of reach."""

    def out_of_reach(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("dualdecoder.checkpoints.make_decoder", out_of_reach)
    monkeypatch.setattr("dualdecoder.engine.load_model", out_of_reach)
    with pytest.raises(UserError, match=words) as found:
        import_module(f"experiments.{experiment}").check(prepared(experiment, override))
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize("experiment", sorted({name for name, _, _ in WRONG}))
def test_the_settings_as_shipped_are_right(a_gpu, experiment: str) -> None:
    import_module(f"experiments.{experiment}").check(prepared(experiment))


def test_no_experiment_records_or_shows_a_traceback_for_a_users_error(tmp_path: Path) -> None:
    """As typed: one line, status 1, nothing recorded; in a sweep the good point is still measured."""
    folders = [f"results_dir={tmp_path}/r", f"hydra.run.dir={tmp_path}/h", f"hydra.sweep.dir={tmp_path}/h"]
    command = [sys.executable, "-m", "experiments.residency"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments, "model=tiny", *folders], cwd=ROOT, capture_output=True, text=True)

    mistyped, sweep = run("bach=1"), run("-m", "batch=0,1")
    assert mistyped.returncode == sweep.returncode == 1
    assert "Could not override 'bach'" in mistyped.stderr
    assert not any("Traceback" in text for text in (mistyped.stderr, sweep.stdout, sweep.stderr))
    assert "batch=0 is not allowed; allowed: a positive integer" in sweep.stderr
    (path,) = (tmp_path / "r").rglob("*.json")
    assert read_record(path).config["batch"] == 1


def test_a_context_with_nothing_to_select_has_no_hit_rate(smollm2, monkeypatch) -> None:
    monkeypatch.setattr(workload, "_loaded", lambda *arguments: smollm2)
    for context in (8, 32):
        (row,) = throughput.measure(config("throughput", f"context={context}", "budget=32", "warmup=1", "steps=2"))
        assert row_problem("throughput", [row]) is None
        assert row["hit_rate"] is None


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2", "smollm2"),
        ("random:llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("{}/run7/final", "run7/final"),
        ("{}/run7/final/", "run7/final"),
        ("{}/run7/small.Q8_0.gguf", "run7/small.Q8_0"),
        ("{}/models--owner--small/snapshots/abc", "owner/small"),
    ],
)
def test_a_model_is_called_by_its_own_name(folder: Path, tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "run7" / "small.Q8_0.gguf").write_text("")
    (tmp_path / "models--owner--small" / "snapshots" / "abc").mkdir(parents=True)
    assert model_name(source.format(tmp_path)) == name


@pytest.mark.parametrize("experiment", ["throughput", "ruler", "residency", "kernel_time"])
def test_a_source_alone_names_and_shapes_the_model(folder: Path, experiment: str) -> None:
    model = config(experiment, f"model.source={folder}").model
    assert model.name == "run7/final"
    assert shape_in(model).layers == 2
    assert config(experiment, f"model.source={folder}", "model.name=mine").model.name == "mine"


def test_the_record_of_a_checkpoint_names_it(folder: Path, tmp_path: Path) -> None:
    cfg = config(
        "residency", f"model.source={folder}", f"results_dir={tmp_path}/r", "context=256", "budget=64", "batch=1"
    )
    cfg = OmegaConf.merge(cfg, {"fresh_process": False})
    path = run_point("residency", cfg, residency.measure, check=residency.check, weights=False)
    record = read_record(path)
    assert path.name.startswith("run7-final-")
    assert {row["model"] for row in record.rows} == {"run7/final"} and record.config["model"]["name"] == "run7/final"
    assert "smollm2" not in json.dumps([record.config["model"], record.rows])


def test_a_shape_that_is_not_the_sources_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.shape='tiny' is not allowed; allowed: smollm2-135m"):
        shape_in(config("throughput", "model.shape=tiny").model)
    assert points.recorded_config(config("throughput"))["model"] == {
        "name": "smollm2",
        "source": "smollm2",
        "shape": "smollm2-135m",
        "dtype": "float32",
    }
