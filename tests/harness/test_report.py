"""The report uses what it can, names what it cannot, and gives the same bytes twice."""

import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes

from experiments import report
from experiments.harness.environment import ROOT
from experiments.harness.records import RecordError
from experiments.report import build_report
from experiments.reporting import figures, paper
from experiments.reporting.charts import draw_chart
from experiments.reporting.collect import Section, collect, collect_all, result_folders
from experiments.reporting.drawing import method_styles
from experiments.reporting.figures import draw_figure
from experiments.reporting.paper import OUTPUTS

GIB = 2**30
EXPERIMENTS = ("throughput", "residency", "prediction", "ruler")


def files(folder: Path) -> dict[str, bytes]:
    """What the report wrote, by name."""
    kinds = ("tables", "figures", "paper")
    return {f"{kind}/{path.name}": path.read_bytes() for kind in kinds for path in (folder / kind).iterdir()}


def text(folder: Path, name: str) -> str:
    return (folder / "tables" / f"{name}.md").read_text()


def lines(folder: Path, name: str) -> list[list[str]]:
    """The cells of all lines of the Markdown tables, without headers."""
    tables = re.findall(r"\| -[^\n]*\n((?:\|[^\n]*\n)+)", text(folder, name))
    return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]


def axes(folder: Path, name: str) -> list[Axes]:
    return draw_figure(name, collect(folder).sections(name)).axes


def legend(axis: Axes) -> list[str]:
    return [label.get_text() for label in axis.get_legend().get_texts()]


@pytest.fixture
def drawn() -> None:
    """For the tests that look at what the report draws."""


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch) -> None:
    # Drawing takes seconds; most tests look at tables.
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(report, "write_figure", lambda *arguments: None)
        monkeypatch.setattr(report, "write_outputs", lambda *arguments: [])


def planned(model: str, context: int, method: str, gpu: dict[str, int], largest: int) -> dict[str, Any]:
    """A row of the residency experiment; sizes in MiB."""
    held = {name: size * 2**20 for name, size in gpu.items()}
    total, host = sum(held.values()), 36 * GIB if method == "dualdecoder" else 0
    common = {"dtype": "bfloat16", "budget": 2048 if host else None, "batch": 12, "cap_bytes": 80 * GIB}
    sizes = {"gpu": held, "host": {"kv": host}, "gpu_total": total, "host_total": host, "per_sequence_gpu": GIB // 2000}
    return {"model": model, "context": context, "method": method, "largest_batch": largest, **common, **sizes}


@pytest.fixture
def put_residency(put) -> None:
    """Two models, two contexts, four methods, in no order."""
    for model in ("qwen2.5-14b", "llama-3.1-8b"):
        for context in (131072, 65536):
            weights = {"weights": 15319, "activations": 5}
            sparse = {**weights, "landmarks": 12288, "outliers": 574, "window": 90, "tables": 1}
            rows = [
                planned(model, context, "arkvale", {**weights, "landmarks": 12288}, 40),
                planned(model, context, "dualdecoder", sparse, 60),
                planned(model, context, "full_kv", {**weights, "kv": 98304}, 0),
                planned(model, context, "ideal", weights, 54214),
            ]
            put("residency", f"{model}-{context}", config={"model": model, "context": context}, rows=rows)


@pytest.fixture
def put_prediction(put) -> None:
    """Three seeds, two layers, 24 steps; KV accuracy jumps from step to step."""
    common = {"model": "smollm2", "context": 4096, "budget": 256, "steps": 24, "reuse": 0.70004}
    scopes = [("all", None, None), *(("layer", i, None) for i in (0, 1)), *(("step", None, i) for i in range(1, 25))]
    measured = [
        {
            **common,
            "prompt": "continue",
            "speculation": seed,
            "scope": scope,
            "layer": layer,
            "step": step,
            "kv_accuracy": accuracy + jump,
        }
        | {"token_accuracy": None if scope == "layer" else 1.0}
        for seed, accuracy in (("random", 0.63), ("random_first", 0.9), ("self", 0.9327))
        for scope, layer, step in scopes
        for jump in [0.05 * (step % 2) if step else 0.0]
    ]
    put("prediction", rows=measured)


def test_the_same_records_give_the_same_bytes(put, drawn, tmp_path: Path) -> None:
    for experiment in EXPERIMENTS:
        put(experiment)
    build_report(tmp_path)
    first = files(tmp_path)
    build_report(tmp_path)
    assert files(tmp_path) == first
    for kind, suffixes in (("tables", (".csv", ".parquet", ".md", ".tex")), ("figures", (".png", ".svg"))):
        assert {f"{kind}/{name}{suffix}" for name in EXPERIMENTS for suffix in suffixes} <= set(first)
    assert "tables/problems.md" in first
    svg = first["figures/throughput.svg"].decode()
    assert "<dc:date>" not in svg and "Hardware: CPU Test CPU" in re.sub(r"\s+", " ", svg)


def test_each_output_of_the_paper_is_made_or_listed_with_its_command(put, drawn, tmp_path: Path) -> None:
    for experiment in EXPERIMENTS:
        put(experiment)
    build_report(tmp_path)
    listed = (tmp_path / "paper" / "README.md").read_text()
    missing = {"ablation_schedule": "step_time -m batch=1,4,8,16,24", "micro": "kernel_time"}
    for output in OUTPUTS:
        made = {path.suffix for path in (tmp_path / "paper").glob(f"{output.name}.*")}
        command = missing.get(output.name)
        assert made == (set() if command else {".csv", ".parquet", ".md", ".tex", ".png", ".svg"}), output.name
        assert (f"no records: run python -m experiments.{command} " if command else f"{output.name}.*") in listed
    latency = pd.read_parquet(tmp_path / "paper" / "latency.parquet")
    assert latency["p50_ms"].tolist() == [11.5, 11.5] and "not a GPU speed" in latency["caption"][0]
    shares = pd.read_csv(tmp_path / "paper" / "fig4.csv")
    assert shares.groupby("method")["share_percent"].sum().tolist() == pytest.approx([100, 100])
    # 2 GiB of landmarks beside 15 GiB of weights.
    auxiliary = pd.read_csv(tmp_path / "paper" / "fig5.csv").set_index("method")["auxiliary_percent"]
    assert auxiliary["dualdecoder"] == pytest.approx(100 * 2 / 17)


@pytest.mark.parametrize("name", [folder.name for folder in result_folders(ROOT / "results") if folder.name != "local"])
def test_committed_tables_are_those_of_the_committed_records(name: str, drawn, tmp_path: Path, monkeypatch) -> None:
    """If this fails: make report. Figures are left out: their bytes may differ between builds of their libraries."""
    for module in (figures, paper):
        monkeypatch.setattr(module, "save", lambda *arguments: None)
    monkeypatch.setattr(report, "write_figure", lambda *arguments: None)
    monkeypatch.setattr(paper, "output_figure", lambda *arguments: None)
    committed, rebuilt = ROOT / "results" / name, tmp_path / name
    shutil.copytree(committed, rebuilt, ignore=shutil.ignore_patterns("tables", "figures", "paper"))
    build_report(rebuilt)
    for suffix in (".csv", ".md", ".tex"):
        made, kept = (
            {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob(f"*{suffix}")}
            for folder in (rebuilt, committed)
        )
        assert made == kept and made


def test_outputs_on_a_gpu(put, rows, gpu_environment, tmp_path: Path) -> None:
    steps = [
        {"model": "llama", "context": 131072, "batch": batch, "variant": variant, "tokens_per_s": speed}
        for batch, variant, speed in ((8, "layer_aware", 168.0), (8, "on_demand", 155.0), (1, "layer_aware", 123.0))
    ]
    sections = [Section("Hardware: NVIDIA H200", pd.DataFrame(steps))]
    output = next(output for output in OUTPUTS if output.name == "ablation_schedule")
    tidy = output.rows(sections[0].rows)
    figure = draw_chart(output.title, output.chart, [(sections[0].caption, tidy)])
    (axis,) = figure.axes
    assert legend(axis) == ["layer_aware", "on_demand"] and axis.get_ylabel() == "tokens per second"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1", "8"]
    assert "NVIDIA H200" in figure.subfigs[0].get_suptitle()


def test_latex_is_escaped(put, tmp_path: Path) -> None:
    put("prediction")
    build_report(tmp_path)
    tex = (tmp_path / "tables" / "prediction.tex").read_text()
    assert r"KV accuracy \%" in tex and r"\toprule" in tex and tex.count("{") == tex.count("}")
    assert not re.search(r"(?<!\\)[%_#]", tex)


def test_tables_hold_the_numbers_and_say_where_they_come_from(put, tmp_path: Path) -> None:
    for experiment in EXPERIMENTS:
        put(experiment)
    build_report(tmp_path)
    line = "| 1K | 2 | dualdecoder | 173.9 | 11.5 (10.3-17.6) | 100.0 | yes | 87.5 | 1.00 | 0.00 | 0.00 | - |"
    assert line in text(tmp_path, "throughput")
    assert "| 1K | 256 | 16 | self | 70.0 | 88.0 | - |" in text(tmp_path, "prediction")
    assert "| vt | 2 | 75.0 (50.0-100.0) | 75.0 (50.0-100.0) |" in text(tmp_path, "ruler")
    numbers = pd.read_csv(tmp_path / "tables" / "throughput.csv")
    assert numbers["step_ms_p50"].tolist() == [11.5, 11.5]


@pytest.mark.parametrize(
    ("work", "cells"),
    [
        ({"attended_share": 0.144, "attended_share_basis": "144 of 1000"}, "14.4 | NO"),
        ({"attended_share": 0.98999, "attended_share_basis": "98999 of 100000"}, "99.0 | NO"),
        ({"attended_share": None, "attended_share_basis": "unknown: evicted"}, "unknown | unknown"),
        ({}, "- | -"),
    ],
)
def test_less_than_equal_work_is_marked(put, rows, tmp_path: Path, work: dict, cells: str) -> None:
    """The last is a record from before shares were measured, beside one that has them."""
    full, dual = rows["throughput"]
    older = {key: value for key, value in dual.items() if not key.startswith("attended_share") and key != "remark"}
    put("throughput", rows=[full, {**older, **work}])
    build_report(tmp_path)
    assert f"| 1K | 2 | dualdecoder | 173.9 | 11.5 (10.3-17.6) | {cells} | 87.5 |" in text(tmp_path, "throughput")
    assert "| 1K | 2 | full_kv | 173.9 | 11.5 (10.3-17.6) | 100.0 | yes | - |" in text(tmp_path, "throughput")


def test_residency_reads_by_model_context_and_method(put_residency, tmp_path: Path) -> None:
    build_report(tmp_path)
    markdown, read = text(tmp_path, "residency"), lines(tmp_path, "residency")
    titles = [f"residency: {model}, bfloat16, budget 2048, cap 80 GiB" for model in ("llama-3.1-8b", "qwen2.5-14b")]
    assert re.findall("## (.*)", markdown) == titles
    methods = ("ideal", "full_kv", "dualdecoder", "arkvale")
    assert [line[:2] for line in read] == [[context, method] for context in ("64K", "128K") for method in methods] * 2
    header = "| context | method | batch | GPU GiB | GPU GiB by category | GiB per sequence | host GiB per sequence |"
    assert f"{header} largest batch |\n| ---: | --- | ---: | ---: | --- | ---: | ---: | ---: |" in markdown
    assert read[1][-1] == "does not fit"
    held = "weights 14.96, landmarks 12.00, outliers 0.56, other 0.09"
    assert read[2] == ["64K", "dualdecoder", "12", "27.61", held, "0.00", "3.00", "60"]
    numbers = [number for line in read for number in re.findall(r"\d+\.\d+", " ".join(line))]
    assert numbers and all(re.fullmatch(r"\d+\.\d\d", number) for number in numbers)


def test_residency_fits_into_a_hundred_columns(put_residency, tmp_path: Path, capsys) -> None:
    build_report(tmp_path)
    printed = capsys.readouterr().out.replace(str(tmp_path), "").splitlines()
    assert max(map(len, printed)) <= 100
    # No name is cut, and none stands apart from its number.
    assert any("64K  dualdecoder" in line and "weights 14.96, landmarks 12.00," in line for line in printed)
    assert any(re.fullmatch(r" +outliers 0\.56, other 0\.09 *", line) for line in printed)
    assert any(re.search(r"GPU GiB  GPU GiB by category +sequence +sequence +batch", line) for line in printed)


def test_the_csv_has_every_category_in_plain_bytes(put_residency, tmp_path: Path) -> None:
    build_report(tmp_path)
    table = pd.read_csv(tmp_path / "tables" / "residency.csv", dtype=str)
    line = table[(table["method"] == "dualdecoder") & (table["context"] == "65536")].iloc[0]
    assert line["gpu_tables_bytes"] == str(2**20) and line["gpu_kv_bytes"] == "0" and line["budget"] == "2048"
    assert line["host_kv_bytes"] == str(36 * GIB)


def test_several_budgets_are_told_apart(put, rows, tmp_path: Path) -> None:
    for experiment in ("residency", "ruler"):
        full, sparse = rows[experiment]
        put(experiment, rows=[{**sparse, "budget": 512}, {**sparse, "budget": 128}, full])
    build_report(tmp_path)
    assert [line[1] for line in lines(tmp_path, "residency")] == ["full_kv", "dualdecoder (128)", "dualdecoder (512)"]
    assert "| samples | full_kv | dualdecoder (128) | dualdecoder (512) |" in text(tmp_path, "ruler")


def test_captions_say_what_kind_of_numbers_they_are(put, put_residency, tmp_path: Path) -> None:
    for experiment in ("throughput", "prediction", "ruler"):
        put(experiment)
    build_report(tmp_path)
    commit, ideal = "commit cccccccccccc (clean)", "weights and activations only, the paper's bound, not a system"
    starts = {
        "throughput": f"Hardware: CPU Test CPU (2 threads); CPU reference, not a GPU speed; {commit}; records: 1",
        "residency": f"planned bytes (no GPU needed); {commit}; records: 4; ideal: {ideal}",
        "prediction": f"quality, computed on CPU Test CPU (2 threads); {commit}; records: 1",
        "ruler": f"quality, computed on CPU Test CPU (2 threads); {commit}; records: 1",
    }
    for experiment, caption in starts.items():
        assert text(tmp_path, experiment).splitlines()[2] == caption
        figure = draw_figure(experiment, collect(tmp_path).sections(experiment))
        assert figure.subfigs[0].get_suptitle().replace("\n", " ") == caption


def test_planned_bytes_do_not_depend_on_the_machine(put, gpu_environment, tmp_path: Path) -> None:
    put("residency", "cpu")
    put("residency", "gpu", environment=gpu_environment, finished="2027-01-01T00:00:00+00:00")
    build_report(tmp_path)
    assert text(tmp_path, "residency").count("planned bytes") == 1
    assert "left out: 1" in text(tmp_path, "residency")


def test_prediction_has_one_decimal_and_the_seeds_in_order(put_prediction, tmp_path: Path) -> None:
    build_report(tmp_path)
    assert [line[4:] for line in lines(tmp_path, "prediction")] == [
        ["self", "93.3", "70.0", "100.0"],
        ["random_first", "90.0", "70.0", "100.0"],
        ["random", "63.0", "70.0", "100.0"],
    ]


def test_ruler_has_tasks_and_methods_in_order_and_the_mean_of_what_all_have(put, rows, tmp_path: Path) -> None:
    tasks = ("cwe", "vt", "niah_single_1", "niah_multikey_2")
    put("ruler", rows=[{**row, "task": task} for task in tasks for row in rows["ruler"]][1:])
    build_report(tmp_path)
    assert "## ruler: tiny, length 1K, budget 256, score % (95 % interval: Wilson; ~ bootstrap" in text(
        tmp_path, "ruler"
    )
    assert "| task | samples | full_kv | dualdecoder |" in text(tmp_path, "ruler")
    score = "75.0 (50.0-100.0)"
    assert [[line[0], *line[2:]] for line in lines(tmp_path, "ruler")] == [
        ["niah_single_1", score, score],
        ["niah_multikey_2", score, score],
        ["vt", score, score],
        ["cwe", "-", score],
        ["mean of 3 tasks", "75.0", "75.0"],
    ]


def test_ruler_has_a_table_for_each_budget_of_its_points(put, rows, tmp_path: Path) -> None:
    """The rows of full KV do not say which of the two points they come from."""
    for budget, score in ((256, 60.0), (512, 70.0)):
        full, dual = rows["ruler"]
        changed = [{**full, "score": score}, {**dual, "score": score, "budget": budget}]
        put("ruler", f"at-{budget}", config={"model": "tiny", "budget": budget}, rows=changed)
    build_report(tmp_path)
    assert re.findall(r"## ruler: .* budget (\d+),", text(tmp_path, "ruler")) == ["256", "512"]
    assert [[cell.split()[0] for cell in line[2:]] for line in lines(tmp_path, "ruler")] == [["60.0"] * 2, ["70.0"] * 2]
    assert len(axes(tmp_path, "ruler")) == 2


def test_ruler_says_which_prompts_were_answered_and_keeps_their_versions_apart(put, rows, tmp_path: Path) -> None:
    """Rows of older records say nothing of it."""
    said = {"prompts": "NVIDIA/RULER c3f5, version 2", "differs": "not as in NVIDIA's: essays are Python's manual"}
    for name, more in (("old", {}), ("new", said)):
        put("ruler", name, config={"name": name}, rows=[{**row, **more} for row in rows["ruler"]])
    build_report(tmp_path)
    markdown = text(tmp_path, "ruler")
    headings = re.findall("## (ruler.*)", markdown)
    assert sorted("version 2" in heading for heading in headings) == [False, True]
    assert markdown.count("not as in NVIDIA's: essays are Python's manual") == 1, "in the caption"
    assert "differs" not in pd.read_csv(tmp_path / "tables" / "ruler.csv")
    with pytest.raises(RecordError, match=r"rows\[0\]\.differs' is 7; it must be a text"):
        put("ruler", "bad", rows=[{**rows["ruler"][0], "differs": 7}])


def test_ruler_has_a_table_a_length_and_marks_bootstraps_and_missing_data(put, rows, tmp_path: Path) -> None:
    nothing = {"task": "qa_1", "score": None, "scores": None, "ci95": None, "interval": None, "samples": 0}
    put(
        "ruler",
        rows=[
            *({**row, "interval": "bootstrap"} for row in rows["ruler"]),
            *({**row, **nothing} for row in rows["ruler"]),
            *({**row, "length": 2048, "interval": "wilson"} for row in rows["ruler"]),
        ],
    )
    build_report(tmp_path)
    assert re.findall(r"## ruler: .* length (\w+),", text(tmp_path, "ruler")) == ["1K", "2K"]
    assert lines(tmp_path, "ruler") == [
        ["vt", "2", "75.0 (~50.0-100.0)", "75.0 (~50.0-100.0)"],
        ["qa_1", "0", "no data", "no data"],
        ["vt", "2", "75.0 (50.0-100.0)", "75.0 (50.0-100.0)"],
    ]
    assert len(axes(tmp_path, "ruler")) == 2
    csv = pd.read_csv(tmp_path / "tables" / "ruler.csv")
    assert csv["score"].isna().sum() == 2 and not (csv["score"] == 0).any()


def test_fidelity_reads_by_method_and_budget_and_is_drawn_over_the_budget(put, tmp_path: Path) -> None:
    put("fidelity")
    build_report(tmp_path)
    assert lines(tmp_path, "fidelity") == [
        ["1K", "full_kv", "-", "-", "64", "0.0000", "0.0000", "100.0", "-"],
        ["1K", "dualdecoder", "64", "64", "64", "0.0500", "0.5000", "95.0", "90.0"],
        ["1K", "dualdecoder", "256", "256", "64", "0.0100", "0.1000", "99.0", "99.0"],
    ]
    divergence, agreement, mass = axes(tmp_path, "fidelity")
    assert [line.get_label() for line in divergence.get_lines()] == ["full_kv", "dualdecoder"]
    assert divergence.get_lines()[1].get_ydata().tolist() == [0.05, 0.01] and divergence.get_yscale() == "log"
    assert [tick.get_text() for tick in agreement.get_xticklabels()] == ["64", "256"]
    assert [line.get_label() for line in mass.get_lines()] == ["dualdecoder"]
    assert mass.get_lines()[0].get_ydata() == pytest.approx([90, 99])
    assert legend(mass) == ["full_kv", "dualdecoder"]


def test_lm_eval_reads_by_task_and_metric(put, tmp_path: Path) -> None:
    put("lm_eval")
    build_report(tmp_path)
    assert lines(tmp_path, "lm_eval") == [["everyday", "acc", "full_kv", "4", "0.750", "-"]]


def test_the_residency_figure_shows_small_and_large_together(put_residency, tmp_path: Path) -> None:
    drawn = axes(tmp_path, "residency")
    assert len(drawn) == 6 and drawn[0].get_title(loc="left").startswith("llama-3.1-8b, bfloat16, batch 12")
    totals, shares, batches = drawn[:3]
    assert legend(totals) == ["ideal", "full_kv", "dualdecoder", "arkvale", "cap, 80 GiB"]
    assert [tick.get_text() for tick in totals.get_xticklabels()] == ["64K", "128K"]
    assert legend(shares) == ["weights", "kv", "landmarks", "outliers", "other"]
    assert batches.get_yscale() == "log"
    written = [item.get_text() for item in batches.texts]
    assert written.count("does not fit") == 2 and "54214" in written
    # Series differ also in grey.
    assert len({line.get_marker() for line in totals.get_lines()[:4]}) == 4
    for axis in (shares, batches):
        hatches = [bars[0].get_hatch() for bars in axis.containers]
        assert len(set(hatches)) == len(hatches) > 3


def test_the_throughput_figure_groups_by_context_and_batch(put, rows, tmp_path: Path) -> None:
    put("throughput", rows=[{**row, "batch": batch} for batch in (4, 1) for row in rows["throughput"]])
    (axis,) = axes(tmp_path, "throughput")
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["context 1K\nbatch 1", "context 1K\nbatch 4"]
    assert legend(axis) == ["full_kv", "dualdecoder"] and axis.get_yscale() == "linear"
    assert "tokens per second" in axis.get_ylabel()


def test_the_prediction_figure_compares_tokens_layers_and_seeds(put_prediction, tmp_path: Path) -> None:
    against, layers, seeds = axes(tmp_path, "prediction")
    assert legend(against) == ["KV accuracy", "token accuracy", "last-step reuse"]
    for axis in (layers, seeds):
        assert legend(axis) == ["self", "random_first", "random", "last-step reuse"]
    for axis in (against, layers, seeds):
        assert [line.get_label() for line in axis.get_lines() if line.get_linestyle() == "--"] == ["last-step reuse"]
        assert axis.get_ylim() == against.get_ylim()
    # Single steps are faint dots beside a running mean.
    dots, mean = against.get_lines()[:2]
    assert dots.get_linestyle() == "None" and dots.get_alpha() < 0.5
    assert sorted(set(dots.get_ydata())) == pytest.approx([93.27, 98.27])
    assert mean.get_ydata()[8:16] == pytest.approx([95.77] * 8)


def test_a_score_of_zero_is_written_as_such(put, rows, tmp_path: Path) -> None:
    put("ruler", rows=[{**row, "score": 0.0, "ci95": [0.0, 40.0]} for row in rows["ruler"]])
    assert [item.get_text() for item in axes(tmp_path, "ruler")[0].texts] == ["0", "0"]


def test_cpu_and_gpu_never_share_a_table(put, rows, gpu_environment, tmp_path: Path) -> None:
    put("throughput", "cpu")
    on_gpu = [{**row, "device": "NVIDIA H200"} for row in rows["throughput"]]
    put("throughput", "gpu", rows=on_gpu, environment=gpu_environment)
    build_report(tmp_path)
    cpu, gpu = text(tmp_path, "throughput").split("Hardware: ")[1:]
    assert "not a GPU speed" in cpu and cpu.count("| 1K |") == 2
    assert gpu.startswith("NVIDIA H200 (143771 MiB, PCIe 5 x16); commit") and gpu.count("| 1K |") == 2


def test_missing_experiments_say_how_to_run_them(put, drawn, tmp_path: Path, capsys) -> None:
    put("ruler")
    build_report(tmp_path)
    (tmp_path / "ruler" / "a.json").unlink()
    build_report(tmp_path)
    output = capsys.readouterr().out
    for experiment in EXPERIMENTS:
        message = f"no records: run python -m experiments.{experiment}"
        assert message in output and message in text(tmp_path, experiment)
    assert not list(tmp_path.rglob("*.png"))
    assert str(tmp_path / "tables") in output and str(tmp_path / "figures") in output


def test_problems_are_listed_and_stop_nothing(put, tmp_path: Path, capsys) -> None:
    put("ruler")
    error = {"type": "OutOfMemoryError", "message": "tried [80] GiB", "traceback": "..."}
    put("throughput", "failed", status="failed", error=error, rows=[])
    put("prediction", "half", status="running", finished=None, seconds=None, rows=[])
    put("residency", "cut").write_text("{")
    build_report(tmp_path)
    problems, output = text(tmp_path, "problems"), capsys.readouterr().out
    for part in ("OutOfMemoryError: tried [80] GiB", "unfinished", "residency/cut.json"):
        assert part in problems and part in output
    assert "75.0" in text(tmp_path, "ruler")


def test_only_the_newest_version_of_a_config_counts(put, rows, tmp_path: Path) -> None:
    old = [{**row, "score": 10.0} for row in rows["ruler"]]
    put("ruler", "old", rows=old, finished="2025-01-01T00:00:00+00:00")
    error = {"type": "ValueError", "message": "long mended", "traceback": "..."}
    put("ruler", "mended", status="failed", error=error, rows=[], finished="2025-02-01T00:00:00+00:00")
    put("ruler", "new")
    build_report(tmp_path)
    assert "10.0 (" not in text(tmp_path, "ruler") and "75.0" in text(tmp_path, "ruler")
    assert "older records of the same configs, left out: 1" in text(tmp_path, "ruler")
    assert "long mended" not in text(tmp_path, "problems")


def test_a_clock_that_was_set_back_does_not_let_older_results_win(put, rows, tmp_path: Path) -> None:
    old, new = ([{**rows["throughput"][0], "tokens_per_s": speed}] for speed in (100.0, 200.0))
    put("throughput", "old", rows=old, number=1, finished="2031-01-01T00:01:00+00:00")
    put("throughput", "new", rows=new, number=2, finished="2026-01-01T00:01:00+00:00")
    put("throughput", "before", rows=old, number=0, finished="2032-01-01T00:01:00+00:00")
    found = collect(tmp_path)
    assert [record.point for record in found.ok] == ["new"]
    assert sorted(record.point for record in found.outdated) == ["before", "old"]


def test_a_failure_is_listed_until_a_later_try_succeeds_whatever_the_clock_says(put, tmp_path: Path) -> None:
    failure = {"status": "failed", "rows": [], "error": {"type": "E", "message": "no", "traceback": ""}}
    put("toy", "failed", number=2, finished="2026-01-01T00:01:00+00:00", **failure)
    put("toy", "first", number=1, finished="2031-01-01T00:01:00+00:00")
    assert [record.point for record in collect(tmp_path).failed] == ["failed"]
    put("toy", "later", number=3, finished="2025-01-01T00:01:00+00:00")
    assert not collect(tmp_path).failed


def test_between_folders_only_the_clock_says_what_is_newer(put, tmp_path: Path) -> None:
    """Each folder counts for itself: the third try in one may be older than the first in another."""
    for folder, name, number, month in (("h200", "third", 3, "01"), ("h200b", "first", 1, "02")):
        path = put("throughput", name, number=number, finished=f"2026-{month}-01T00:01:00+00:00")
        (tmp_path / folder).mkdir()
        path.rename(tmp_path / folder / path.name)
    assert [record.point for record in collect_all(tmp_path).ok] == ["first"]


@pytest.mark.parametrize("argument", ["results_dir", "folder=x", "results_dir="])
def test_a_wrong_argument_is_one_clear_message(argument: str, capsys) -> None:
    assert report.main([argument]) == 2
    assert (
        capsys.readouterr().err
        == f"error: argument {argument!r} is not understood; allowed: results_dir=VALUE, readme=VALUE\n"
    )


def test_an_empty_folder_is_no_error(tmp_path: Path) -> None:
    assert report.main([f"results_dir={tmp_path}"]) == 0


def cached(speculation: str, cache: str, capacity: float, prefetch: bool, misses: float) -> dict[str, Any]:
    """A row of the prediction experiment about a cache."""
    common = {"prompt": "question", "model": "smollm2", "context": 4096, "budget": 256, "steps": 24, "scope": "cache"}
    found = {"cache": cache, "capacity": capacity, "prefetch": prefetch, "misses": misses}
    return {**common, "speculation": speculation, **found, "prefetched": 0.21 if prefetch else 0.0}


def test_caches_have_a_table_and_a_figure_of_their_own(put, rows, tmp_path: Path) -> None:
    """Beside the rows that were there before them, in no order."""
    caches = [
        cached(seed, *cache, prefetch, 0.05 if prefetch else 0.3)
        for seed in ("random", "self")
        for cache in (("LRU", 1.5), ("LRU", 1), ("last set", 1))
        for prefetch in (True, False)
    ]
    caches.append(cached("self", "optimum", 1, False, 0.2))
    put("prediction", rows=[*caches, *rows["prediction"]])
    build_report(tmp_path)
    caches = ["last set 1x", "LRU 1x", "LRU 1.5x"]
    expected = [f"{seed} {cache} 30.0 5.0 21.0" for seed in ("self", "random") for cache in caches]
    expected.insert(3, "self optimum 1x 20.0 - -")
    assert [" ".join(line[3:]) for line in lines(tmp_path, "prediction_cache")] == expected
    assert "| 1K | 256 | 16 | self | 70.0 | 88.0 | - |" in text(tmp_path, "prediction")
    assert "LRU" not in text(tmp_path, "prediction")
    missing, ahead = axes(tmp_path, "prediction_cache")
    assert legend(missing) == ["no prediction", "optimum without prefetch", "prefetching, self", "prefetching, random"]
    assert legend(ahead) == ["prefetched, self", "prefetched, random"]
    assert missing.get_lines()[2].get_xydata().tolist() == [[1, 5], [1.5, 5]]


def test_a_cache_row_must_be_whole(put, rows) -> None:
    row = cached("self", "LRU", 2, True, 0.1)
    with pytest.raises(ValueError, match=r"rows\[0\]\.misses' is 1\.1; it must be a number from 0 to 1"):
        put("prediction", rows=[{**row, "misses": 1.1}])


def test_charts_of_speeds_name_those_of_less_work(put, rows, tmp_path: Path) -> None:
    full, dual = rows["throughput"]
    less = {**dual, "method": "oasiskv", "attended_share": 0.144}
    unknown = {**dual, "method": "h2o", "attended_share": None, "attended_share_basis": "unknown: evicted"}
    older = {key: value for key, value in dual.items() if not key.startswith("attended_share")}
    put("throughput", rows=[full, dual, less, unknown, {**older, "method": "quest"}])
    ((_, table),) = paper.output_tables("table1", collect(tmp_path))
    marked = ["oasiskv (14 % of its set)", "quest", "h2o (share unknown)"]
    assert table["method"].tolist() == ["full_kv", "dualdecoder", *marked]
    styles = method_styles(table.assign(series=table["method"]))
    plain = method_styles(pd.DataFrame({"method": ["full_kv", "oasiskv"], "series": ["full_kv", "oasiskv"]}))
    assert styles["oasiskv (14 % of its set)"] == plain["oasiskv"]
