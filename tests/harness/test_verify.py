"""Claims are judged by their rules, from records; what was reached before must not be lost unseen."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import verify
from experiments.harness.environment import ROOT
from experiments.harness.records import RecordError
from experiments.reporting.claims import ClaimsError, judge, read_claims
from experiments.reporting.claims_table import claims_markdown
from experiments.reporting.collect import collect, collect_all

CHECK: dict[str, Any] = {
    "name": "tokens/s",
    "paper": 170,
    "within": 0.1,
    "experiment": "throughput",
    "where": {"method": "dualdecoder"},
    "column": "tokens_per_s",
    "statistic": "only",
}
HIT = {"name": "hit rate", "at_least": 0.8, **{key: CHECK[key] for key in ("experiment", "where", "statistic")}}
HIT["column"] = "hit_rate"


def claim(*checks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    words = {"id": "C1", "claim": "fast", "where_in_paper": "Table 1", "command": "run", "minutes": 1, "not_run": "why"}
    return {**words, "checks": list(checks), **changes}


@pytest.fixture
def words(put, rows, tmp_path: Path):
    """words(claim): its verdicts on the rows of a CPU record."""
    changing = [{**row, "changing": number} for number, row in enumerate(rows["throughput"])]
    put("throughput", rows=changing)
    return lambda *claims: [verdict.words for verdict in judge(list(claims), collect(tmp_path).ok)]


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([CHECK], "reproduced"),
        ([CHECK, HIT], "reproduced"),
        ([CHECK, {**HIT, "at_least": 0.9}], "partly"),
        ([CHECK, {**HIT, "where": {"method": "shadowkv"}}], "partly"),
        ([{**CHECK, "instead": "a small model"}], "partly"),
        ([{**CHECK, "within": 0.01}], "not reproduced"),
        ([{**CHECK, "where": {"method": "shadowkv"}}], "not run"),
        ([{**CHECK, "needs_gpu": True}], "not run"),
    ],
)
def test_verdicts(words, checks: list[dict[str, Any]], verdict: str) -> None:
    assert words(claim(*checks)) == [verdict]


def test_an_unmeasured_part_keeps_a_claim_from_being_reproduced(words) -> None:
    assert words(claim(CHECK, unmeasured=["the rest"])) == ["partly"]


def test_numbers_are_combined_by_rule(put, rows, tmp_path: Path) -> None:
    full, dual = rows["throughput"]
    faster = {**dual, "tokens_per_s": 300.0, "batch": 8, "step_ms": [10.0] * 9 + [12.0]}
    put("throughput", rows=[full, dual, faster])
    ratio = {**CHECK, "statistic": "max", "over": {"where": {"method": "full_kv"}}, "samples": "step_ms"}
    difference = {**CHECK, "statistic": "mean", "minus": {"where": {"method": "full_kv"}}}
    host = {**CHECK, "where": {"batch": [8, 9]}, "column": ["host_bytes", "kv_gpu_bytes"], "unit": 2**20}
    (verdict,) = judge([claim(ratio, difference, host)], collect(tmp_path).ok)
    first, second, third = (finding.number for finding in verdict.findings)
    assert first.value == pytest.approx(300 / 173.9)
    # Half of p10 to p90 over the median: (10.2 - 10) / 20 of the one, (17.6 - 10.3) / 23 of the other.
    assert first.spread == pytest.approx(0.2 / 20 + 7.3 / 23)
    assert second.value == pytest.approx((173.9 + 300) / 2 - 173.9)
    assert third.value == 16 + 4


def test_a_check_may_take_only_records_with_some_settings(put, rows, tmp_path: Path) -> None:
    """A row of full KV does not say what budget the others in its record had."""
    full, dual = rows["throughput"]
    put("throughput", "small", config={"budget": 256}, rows=[{**full, "tokens_per_s": 100.0}, dual])
    put("throughput", "large", config={"budget": 512}, rows=[{**full, "tokens_per_s": 500.0}])
    mean = {**CHECK, "statistic": "mean", "where": {"method": "full_kv"}}
    checks = [mean, {**mean, "config": {"budget": 256}}, {**mean, "config": {"budget": [512, 1024]}}]
    (verdict,) = judge([claim(*checks)], collect(tmp_path).ok)
    assert [finding.number.value for finding in verdict.findings] == [300.0, 100.0, 500.0]


@pytest.mark.parametrize("work", [{"attended_share": 0.98}, {"attended_share": None}, {}])
def test_a_speed_of_less_work_answers_for_nothing(put, rows, tmp_path: Path, work: dict[str, Any]) -> None:
    full, dual = ({k: v for k, v in row.items() if k != "attended_share"} for row in rows["throughput"])
    put("throughput", rows=[{**full, "attended_share": 1.0}, {**dual, **work}])
    over = {**CHECK, "where": {"method": "full_kv"}, "over": {"where": {"method": "dualdecoder"}}}
    kept = {**CHECK, "where": {"method": "full_kv"}}
    alone, ratio, both = (claim(*checks) for checks in ([CHECK], [over], [kept, CHECK]))
    verdicts = judge([alone, ratio, both], collect(tmp_path).ok)
    assert [verdict.words for verdict in verdicts] == ["not run", "not run", "partly"]
    assert [[finding.left_out for finding in verdict.findings] for verdict in verdicts] == [[1], [1], [0, 1]]
    markdown = claims_markdown(verdicts)
    assert markdown.count("not run: no record whose work is known to be equal") == 2
    assert markdown.count("| no record of equal work |") == 3


def test_of_exact_attention_the_share_is_known_without_a_measurement(put, rows, tmp_path: Path) -> None:
    full, dual = ({k: v for k, v in row.items() if k != "attended_share"} for row in rows["throughput"])
    can = {"exact": True, "recalls": True, "offloads": False}
    put("throughput", rows=[{**full, "capabilities": can}, {**dual, "capabilities": {**can, "exact": False}}])
    checks = [{**CHECK, "where": {"method": name}} for name in ("full_kv", "dualdecoder")]
    (verdict,) = judge([claim(*checks)], collect(tmp_path).ok)
    assert [finding.number is None for finding in verdict.findings] == [False, True]


def test_each_kind_of_hardware_is_judged_apart(put, rows, gpu_environment, tmp_path: Path) -> None:
    put("throughput", "cpu")
    on_gpu = [{**row, "device": "cuda", "tokens_per_s": 1000.0} for row in rows["throughput"]]
    put("throughput", "gpu", rows=on_gpu, environment=gpu_environment)
    verdicts = judge([claim(CHECK)], collect(tmp_path).ok)
    assert [(item.hardware, item.words) for item in verdicts] == [
        ("CPU Test CPU", "reproduced"),
        ("NVIDIA H200", "not reproduced"),
    ]
    assert [verify.tag(item.hardware) for item in verdicts] == ["cpu", "nvidia-h200"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"statistic": "mode"}, "statistic='mode'; allowed: only, max"),
        ({"colum": "x"}, "field 'colum' is not known"),
        ({"at_least": 1}, "one of within, at_least, at_most"),
        ({"over": {"path": "x"}}, "over: field 'path' is not known"),
    ],
)
def test_a_wrong_check_is_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [claim({**CHECK, **changes})]}))
    with pytest.raises(ClaimsError, match=f"C1, tokens/s.*{problem}"):
        read_claims(path)


def test_only_means_one(words) -> None:
    with pytest.raises(ClaimsError, match=r"tokens/s: 2 rows match \{'batch': 2\}; allowed: one, or a statistic"):
        words(claim({**CHECK, "where": {"batch": 2}, "column": "changing"}))


def run(tmp_path: Path, *arguments: str) -> int:
    claims = tmp_path / "claims.yaml"
    claims.write_text(yaml.safe_dump({"claims": [claim(CHECK)]}))
    options = [f"results={tmp_path}", f"claims={claims}", f"output={tmp_path / 'CLAIMS.md'}"]
    return verify.main([*options, *arguments])


@pytest.fixture
def place(put, rows, tmp_path: Path):
    """place(speed): one finished record in the folder of a machine, with that speed."""

    def write(speed: float) -> None:
        changed = [{**row, "tokens_per_s": speed} for row in rows["throughput"]]
        path = put("throughput", rows=changed)
        (tmp_path / "machine").mkdir(exist_ok=True)
        path.rename(tmp_path / "machine" / path.name)

    return write


def test_what_was_reached_must_be_reached_again(place, tmp_path: Path, capsys) -> None:
    place(170.0)
    assert run(tmp_path, "update=true") == 0 and run(tmp_path) == 0
    assert "| C1 | reproduced | CPU Test CPU |" in (tmp_path / "CLAIMS.md").read_text()
    place(120.0)
    assert run(tmp_path) == 1
    assert "lost: C1 on cpu: not reproduced; it was: reproduced" in capsys.readouterr().out
    (tmp_path / "machine" / "a.json").unlink()
    assert run(tmp_path) == 1
    assert "lost: C1 on cpu: not run; it was: reproduced" in capsys.readouterr().out


def test_a_number_that_left_its_tolerance_is_a_loss_and_a_better_verdict_is_none(place, tmp_path: Path, capsys) -> None:
    place(170.0)
    run(tmp_path, "update=true")
    place(180.0)
    assert run(tmp_path) == 1
    assert "tokens/s is 180; it was 170, tolerance 2.0%" in capsys.readouterr().out
    place(120.0)
    run(tmp_path, "update=true")
    place(121.0)
    assert run(tmp_path) == 0


def test_a_record_that_cannot_be_read_is_named_and_the_others_count(place, tmp_path: Path, capsys) -> None:
    place(170.0)
    (tmp_path / "machine" / "b.json").write_text('{"schema": 99}')
    assert run(tmp_path) == 0
    output = capsys.readouterr().out
    assert "b.json: field 'schema' is 99; this code reads 1 to 3" in output and "reproduced" in output
    assert isinstance(collect_all(tmp_path).errors[0], RecordError)


def test_the_committed_claims_are_those_of_the_committed_records(tmp_path: Path) -> None:
    """If this fails: make verify, and `make verify ARGS=update=true` where the change is meant."""
    claims = read_claims(ROOT / "conf" / "claims.yaml")
    assert [item["id"] for item in claims] == [f"C{number}" for number in range(1, 12)]
    verdicts = judge(claims, collect_all(ROOT / "results").ok)
    assert claims_markdown(verdicts) == (ROOT / "CLAIMS.md").read_text()
    assert verify.losses(verify.read_expected(ROOT / "results" / "expected"), verdicts) == []
    assert {verify.tag(verdict.hardware) for verdict in verdicts if verdict.hardware} == {
        path.stem for path in (ROOT / "results" / "expected").glob("*.yaml")
    }
