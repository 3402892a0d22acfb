"""Every config composes, every experiment measures, on small points of the real model or the tiny one."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.plugins.launcher import Launcher
from hydra.utils import get_class
from omegaconf import OmegaConf

from dualdecoder.checkpoints import load_tokenizer, named_shape, resolve
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.method import REGISTRY, method_config
from dualdecoder.stop_ids import checkpoint_stop_ids
from experiments import fidelity, prediction, residency, ruler, throughput
from experiments.__main__ import experiments
from experiments.harness import workload
from experiments.harness.environment import visible_gpus
from experiments.harness.records import load_records
from experiments.harness.rows import row_problem
from experiments.harness.statistics import mean_interval, wilson_interval
from experiments.reproduce import PROFILES, read_profile
from experiments.ruler_tasks import OFFLINE_TASKS
from experiments.ruler_tasks.prompts import VERSION

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
REPRODUCED = ("throughput", "residency", "prediction", "ruler", "fidelity")
EXPERIMENTS = (*REPRODUCED, "lm_eval")
GPU_EXPERIMENTS = ("step_time", "method_time", "attention_time", "kernel_time", "prefill_time")
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
HARDWARE = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml"))
METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))


def config(name: str, *overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, list(overrides))


@pytest.fixture
def loaded(smollm2: Engine, monkeypatch) -> None:
    """The session's model instead of another copy of it."""
    monkeypatch.setattr(workload, "_loaded", lambda *arguments: smollm2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("experiment", [*EXPERIMENTS, *GPU_EXPERIMENTS])
def test_every_model_config_composes(experiment: str, model: str) -> None:
    cfg = config(experiment, f"model={model}")
    OmegaConf.resolve(cfg)
    assert cfg.model.name == model
    named_shape(cfg.model.shape)


@pytest.mark.parametrize("experiment", ["throughput", "method_time"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_config_is_valid(experiment: str, method: str) -> None:
    cfg = config(experiment, f"method={method}")
    assert cfg.method.get("label", cfg.method.name) == method
    method_config(cfg.method.name, OmegaConf.to_container(cfg.method.options, resolve=True))


@pytest.mark.parametrize("hardware", HARDWARE)
def test_every_hardware_config_is_a_cap(hardware: str) -> None:
    cfg = config("residency", f"hardware={hardware}")
    assert cfg.hardware.name == hardware and cfg.hardware.gpu_budget_gib > 0


@pytest.mark.parametrize("path", [*PROFILES.values(), "conf/ruler_grid.yaml"])
def test_lists_of_runs_compose(path: str) -> None:
    runs = read_profile(ROOT / path).runs
    for run in runs:
        single = [item if "[" in item else item.split(",")[0] for item in run.overrides if item != "-m"]
        OmegaConf.resolve(config(run.experiment, *single))
    assert path != PROFILES["cpu"] or {run.experiment for run in runs} == set(REPRODUCED)


def test_every_experiment_has_a_primary_config_that_offers_a_dry_run_and_a_retry() -> None:
    """A new one begins its defaults with `- base`, which holds these keys and Hydra's folders."""
    assert {*EXPERIMENTS, *GPU_EXPERIMENTS} <= set(experiments())
    for name in experiments():
        cfg = config(name)
        assert (cfg.dry_run, cfg.retry_failed, cfg.results_dir) == (False, False, "results/local"), name


@pytest.mark.parametrize("launcher", ["gpus", "slurm", "ray_cluster"])
def test_example_launchers_compose(launcher: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("throughput", [f"hydra/launcher={launcher}"], return_hydra_config=True)
    target = cfg.hydra.launcher._target_
    assert target.startswith("hydra_plugins.")
    if launcher != "ray_cluster":  # an extra of many megabytes, not in the lock
        assert issubclass(get_class(target), Launcher)
    if launcher == "gpus":
        assert cfg.hydra.launcher.n_jobs == max(1, len(visible_gpus()))


def test_the_command_lists_the_experiments_and_knows_what_hydra_does_not(tmp_path) -> None:
    command = [sys.executable, "-m", "experiments"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(experiments())
    sweep = ["residency", "--dry-run", "-m", "model=tiny", "context=65536,131072", "batch=1"]
    folders = [f"results_dir={tmp_path}", f"hydra.sweep.dir={tmp_path}/hydra"]
    result = subprocess.run([*command, *sweep, *folders], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^to do: .*: time unknown, \d+\.\d\d GiB planned$", result.stdout, re.MULTILINE)) == 2
    assert not list(tmp_path.rglob("*.json"))


def test_the_ruler_grid_holds_all_offline_tasks() -> None:
    [grid] = [run for run in read_profile(CONF / "ruler_grid.yaml").runs if run.experiment == "ruler"]
    assert f"task={','.join(OFFLINE_TASKS)}" in grid.overrides


def test_residency_rows() -> None:
    rows = residency.measure(config("residency", "model=llama-3-8b"))
    assert row_problem("residency", rows) is None
    by_method = {row["method"]: row for row in rows}
    assert sorted(by_method) == sorted(["ideal", *REGISTRY])
    assert by_method["dualdecoder"]["gpu"]["landmarks"] == 12 * 2**30
    cfg = config("residency", "model=llama-3-8b")
    for name, row in by_method.items():
        most, more = (residency._plan(cfg, name, row["largest_batch"] + extra).gpu_total for extra in (0, 1))
        assert most <= row["cap_bytes"] < more
    for name in ("full_kv", "dualdecoder"):
        row = by_method[name]
        fixed = row["gpu_total"] - 12 * row["per_sequence_gpu"]
        assert row["largest_batch"] == (row["cap_bytes"] - fixed) // row["per_sequence_gpu"]
    batches = [by_method[name]["largest_batch"] for name in ("full_kv", "dualdecoder", "ideal")]
    assert batches == sorted(batches)


def test_residency_of_a_model_that_does_not_fit() -> None:
    rows = residency.measure(config("residency", "model=qwen2.5-32b", "hardware=gpu24"))
    assert {row["largest_batch"] for row in rows} == {0}


def test_throughput_rows(loaded) -> None:
    overrides = ("context=96", "budget=32", "steps=3", "warmup=1", "batch=2")
    for method, rows_per_step in (("full_kv", 1), ("dualdecoder", 2)):
        (row,) = throughput.measure(config("throughput", f"method={method}", *overrides))
        assert row_problem("throughput", [row]) is None
        assert (row["rows_per_step"], row["device"], len(row["step_ms"])) == (rows_per_step, "cpu", 3)
        # The buffers of 2 layers move 32 tokens of K and V for 3 heads and 2 sequences in 30 layers.
        most = 30 * 2 * 3 * 32 * 64 * 2 * 4
        assert row["prefetched_bytes_per_step"] == (0 if method == "full_kv" else most)
        assert row["urgent_bytes_per_step"] <= most


@pytest.mark.parametrize("prompt", ["continue", "question"])
def test_prediction_rows(loaded, prompt: str) -> None:
    rows = prediction.measure(config("prediction", f"prompt={prompt}", "context=200", "budget=64", "steps=6"))
    assert row_problem("prediction", rows) is None
    for speculation in ("self", "random_first", "random"):
        of_kind = [row for row in rows if row["speculation"] == speculation]
        assert [row["scope"] for row in of_kind] == ["all"] + ["layer"] * 30 + ["step"] * 5 + ["cache"] * 14
        total, steps = of_kind[0], [row for row in of_kind if row["scope"] == "step"]
        # Every step selects the same number of chunks, so the mean over steps is the overall share.
        assert sum(row["kv_accuracy"] for row in steps) / 5 == pytest.approx(total["kv_accuracy"])
        assert sum(row["token_accuracy"] for row in steps) / 5 == pytest.approx(total["token_accuracy"])
        _check_caches(total, [row for row in of_kind if row["scope"] == "cache"])


def test_prediction_ends_with_the_answer(smollm2: Engine, monkeypatch) -> None:
    """Nothing is counted behind a stop token, and rows say how many steps there were."""
    cfg = config("prediction", "context=200", "budget=64", "steps=8", "speculations=[self]")
    free = smollm2.generate([workload.manual_prompt(smollm2, 200)], 9)[0].token_ids
    monkeypatch.setattr(workload, "_loaded", lambda *_: stopping(smollm2, free[4]))
    taken = free.index(free[4])
    rows = prediction.measure(cfg)
    assert {row["steps"] for row in rows} == {taken}
    assert [row["step"] for row in rows if row["scope"] == "step"] == list(range(1, taken))
    monkeypatch.setattr(workload, "_loaded", lambda *_: stopping(smollm2, free[0]))
    with pytest.raises(ConfigError, match=r"prompt='continue' is not allowed.*ends after 1 tokens"):
        prediction.measure(cfg)


def stopping(engine: Engine, token: int) -> Engine:
    return Engine(engine.model, engine.tokenizer, engine.method_name, engine.config, stop_ids=[token])


def _check_caches(total: dict, rows: list[dict]) -> None:
    """The method's counters and the simulator agree; larger caches miss less, and none less than the optimum."""

    def misses(cache: str, prefetch: bool = False) -> list[float]:
        return [row["misses"] for row in rows if (row["cache"], row["prefetch"]) == (cache, prefetch)]

    assert [row["capacity"] for row in rows] == [1, 1, 1.5, 2, 4] * 2 + [1, 1.5, 2, 4]
    for prefetch, share in ((False, "reuse"), (True, "kv_accuracy")):
        lru = misses("LRU", prefetch)
        assert misses("last set", prefetch) == [lru[0]] == [pytest.approx(1 - total[share])]
        assert lru == sorted(lru, reverse=True)
    assert all(best <= lru for best, lru in zip(misses("optimum"), misses("LRU"), strict=True))


def test_ruler_rows(loaded) -> None:
    rows = ruler.measure(config("ruler", "length=400", "samples=3", "batch=2", "budget=128"))
    assert row_problem("ruler", rows) is None
    assert [row["method"] for row in rows] == ["full_kv", "dualdecoder", "shadowkv", "streaming_llm"]
    for row in rows:
        assert len(row["answers"]) == len(row["scores"]) == 3
        assert row["score"] == pytest.approx(sum(row["scores"]) / 3)
        assert max(row["tokens"]) <= 400
        assert (row["interval"], row["prefill_s"]) == ("wilson", rows[0]["prefill_s"])
        assert row["prompts"].endswith(f"version {VERSION}") and "essays are Python's manual" in row["differs"]
    # The needle is found by the exact method, so the prompt and the answer are put together rightly.
    assert rows[0]["score"] == 100


def test_ruler_answers_end_at_the_end_of_turn(smollm2: Engine, monkeypatch) -> None:
    """Also if the tokenizer takes another token for the end, as one converted by transformers 5.17 does."""
    mistaken = load_tokenizer("smollm2")
    mistaken.eos_token = mistaken.bos_token
    stop_ids = checkpoint_stop_ids(resolve("smollm2"), mistaken, smollm2.model.config.vocabulary)
    engine = Engine(smollm2.model, mistaken, smollm2.method_name, smollm2.config, stop_ids)
    monkeypatch.setattr(workload, "_loaded", lambda *_: engine)
    rows = ruler.measure(config("ruler", "length=400", "samples=2", "budget=128", "methods=[full_kv,dualdecoder]"))
    answers = [answer for row in rows for answer in row["answers"]]
    assert len(answers) == 4
    assert all(answer and "<|im_" not in answer for answer in answers)


def test_ruler_prefills_a_sample_once_however_many_methods_answer_it(loaded, monkeypatch) -> None:
    prefilled: list[int] = []
    prefill = Engine.prefill
    monkeypatch.setattr(Engine, "prefill", lambda self, ids: prefilled.append(len(ids)) or prefill(self, ids))
    monkeypatch.setattr(ruler, "_answer", lambda engine, snapshots, new_tokens: [engine.method_name] * len(snapshots))
    methods = "methods=[full_kv,dualdecoder,baselines.full_kv:FullKV]"
    rows = ruler.measure(config("ruler", methods, "length=400", "samples=3", "batch=2"))
    assert len(prefilled) == 3
    assert [row["answers"] for row in rows] == [
        [name] * 3 for name in ("full_kv", "dualdecoder", "baselines.full_kv:FullKV")
    ]


def test_ruler_without_a_data_set_says_so_and_gives_no_score(loaded) -> None:
    rows = ruler.measure(config("ruler", "task=qa_1", "length=1024", "methods=[full_kv,dualdecoder]"))
    assert row_problem("ruler", rows) is None
    assert [(row["method"], row["samples"], row["score"]) for row in rows] == [
        ("full_kv", 0, None),
        ("dualdecoder", 0, None),
    ]


def test_ruler_questions_score_any_gold_string(loaded, monkeypatch) -> None:
    monkeypatch.setattr(ruler, "_answer", lambda engine, snapshots, new_tokens: ["It was 1731."])
    files = f"data.squad={ROOT}/tests/data/qa/squad.json"
    rows = ruler.measure(config("ruler", "task=qa_1", "length=800", "samples=1", files))
    assert {row["score"] for row in rows} == {100}
    essays = ruler.measure(
        config("ruler", "task=qa_1", "length=800", "samples=1", files, f"data.essays={ROOT}/README.md")
    )
    assert not any("manual" in row["differs"] for row in essays)


def test_methods_are_recorded_with_their_options() -> None:
    cfg = workload.with_methods(config("ruler", "budget=64", "methods=[dualdecoder,other.place:Method]"))
    assert OmegaConf.to_container(cfg.methods, resolve=True) == {
        "dualdecoder": {"name": "dualdecoder", "options": {"budget": 64}},
        "other.place:Method": {"name": "other.place:Method", "options": {}},
    }
    assert workload.with_methods(cfg) is cfg
    assert workload.with_value(cfg, "budget", 32).methods.dualdecoder.options.budget == 32


def test_fidelity_rows(loaded) -> None:
    overrides = ("context=200", "steps=6", "texts=2", "budgets=[32,256]")
    rows = fidelity.measure(config("fidelity", "methods=[full_kv,dualdecoder]", *overrides))
    assert row_problem("fidelity", rows) is None
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("full_kv", None),
        ("dualdecoder", 32),
        ("dualdecoder", 256),
    ]
    full, small, covering = rows
    assert (full["kl_mean"], full["top1_agreement"], full["attention_mass"]) == (0, 1, None)
    assert covering["kl_mean"] == pytest.approx(0, abs=1e-5) and covering["attention_mass"] == pytest.approx(1)
    assert small["kl_mean"] > 1e-4 and small["kl_p99"] > small["kl_mean"]
    assert 0.3 < small["attention_mass"] < 0.999


@pytest.mark.parametrize(
    ("experiment", "overrides", "field"),
    [
        (ruler, ["samples=0"], "samples"),
        (ruler, ["task=nope"], "task"),
        (ruler, ["length=100"], "length"),
        (ruler, ["length=9000"], "length=9000 is not allowed; allowed: at most 8192 tokens, the context of smollm2"),
        (ruler, ["methods=[]"], "methods"),
        (ruler, ["methods=[nope]"], "method='nope' is not known"),
        (ruler, ["data.essays=nowhere.txt", "task=niah_single_2"], "data.essays='nowhere.txt' is not a file"),
        (fidelity, ["steps=1"], "steps"),
        (fidelity, ["methods=[]"], "methods"),
        (fidelity, ["context=9000"], "context"),
        (throughput, ["steps=0"], "steps"),
        (throughput, ["batch=two"], "batch"),
        (throughput, ["context=900000"], "context"),
        (prediction, ["prompt=poem"], "prompt"),
        (prediction, ["prompt=question", "context=20"], "context"),
        (prediction, ["steps=1"], "steps"),
        (prediction, ["capacities=[0.5]"], "capacities"),
        (residency, ["batch=0"], "batch"),
        (residency, ["budget=7"], "budget"),
    ],
)
def test_bad_settings(loaded, experiment, overrides: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        experiment.measure(config(experiment.__name__.rpartition(".")[2], *overrides))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", GPU_EXPERIMENTS)
def test_gpu_experiments_say_that_there_is_no_gpu(name: str) -> None:
    with pytest.raises(ConfigError, match="hardware='no GPU' is not allowed; allowed: a machine with an NVIDIA GPU"):
        import_module(f"experiments.{name}").measure(config(name))


def test_random_weights_have_no_text_to_measure() -> None:
    with pytest.raises(ConfigError, match=r"model\.source='random:llama-3-8b' is not allowed"):
        throughput.measure(config("throughput", "model=llama-3-8b"))


def test_a_point_prints_its_table(tmp_path) -> None:
    command = [sys.executable, "-m", "experiments.residency", f"results_dir={tmp_path}"]
    result = subprocess.run([*command, f"hydra.run.dir={tmp_path}/hydra"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "weights 14.96, landmarks 12.00" in result.stdout
    assert "planned bytes" in result.stdout


def test_a_users_error_is_one_line(tmp_path) -> None:
    command = [sys.executable, "-m", "experiments.residency", "budget=7", f"results_dir={tmp_path}"]
    result = subprocess.run([*command, f"hydra.run.dir={tmp_path}/hydra"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "error: budget=7 is not allowed; allowed: a positive multiple of chunk (8 tokens)\n"
    assert not list(tmp_path.rglob("*.json"))


def test_a_sweep_from_the_command_line(tmp_path) -> None:
    command = [sys.executable, "-m", "experiments.residency", "-m", "context=65536,131072", "model=tiny"]
    for _ in range(2):
        result = subprocess.run(
            [*command, f"results_dir={tmp_path}", f"hydra.sweep.dir={tmp_path}/hydra"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
    assert result.stdout.count("already recorded") == 2
    records, errors = load_records(tmp_path / "residency")
    assert not errors
    assert [record.status for record in records] == ["ok", "ok"]
    assert {record.config["context"] for record in records} == {65536, 131072}


def test_question_prompt_has_the_asked_length(smollm2: Engine) -> None:
    ids = workload.question_prompt(smollm2, 300)
    text = smollm2.tokenizer.decode(ids)
    assert len(ids) == 300
    assert text.endswith("<|im_start|>assistant\n")
    assert "\x00" not in text
    assert workload.manual_text()[:300] in text


def test_wilson_interval() -> None:
    """Values from the closed form with z = 1.96, as in textbooks: 0 of 10, 10 of 10, 5 of 10."""
    assert wilson_interval(0, 10) == pytest.approx([0, 27.75], abs=0.01)
    assert wilson_interval(100, 10) == pytest.approx([72.25, 100], abs=0.01)
    assert wilson_interval(50, 10) == pytest.approx([23.66, 76.34], abs=0.01)


def test_mean_interval_is_wilsons_or_a_bootstraps() -> None:
    assert mean_interval([100.0, 0.0, 100.0, 0.0]) == ("wilson", wilson_interval(50, 4))
    assert mean_interval([40.0, 40.0]) == ("wilson", wilson_interval(40, 2))
    kind, (low, high) = mean_interval([50.0, 75.0] * 50)
    assert kind == "bootstrap"
    # The standard error of 100 samples with a standard deviation of 12.5 is 1.25.
    assert (low, high) == (pytest.approx(62.5 - 1.96 * 1.25, abs=0.5), pytest.approx(62.5 + 1.96 * 1.25, abs=0.5))
