"""Records survive a round trip, and a bad file is named without hiding the others."""

import json
from pathlib import Path

import pytest

from experiments.harness.environment import ROOT
from experiments.harness.records import RecordError, load_records, read_record, write_record
from experiments.harness.rows import ROW_FIELDS


def edit(path: Path, **changes) -> None:
    """Change fields of a record's JSON behind the writer's back; None as `...` removes one."""
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def test_round_trip(put) -> None:
    path = put("throughput")
    record = read_record(path)
    assert record.rows[0]["step_ms"] == [10.0, 11.0, 12.0, 20.0]
    before = path.read_bytes()
    write_record(path, record)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", 4),
        ("schema", "2"),
        ("schema", ...),
        ("environment", ...),
        ("rows", {}),
        ("status", "fine"),
        ("finished", None),
        ("error", {"type": "E"}),
        ("surprise", 1),
    ],
)
def test_a_wrong_field_is_named_and_the_other_records_load(put, tmp_path: Path, field: str, value) -> None:
    good, bad = put("throughput", "good"), put("throughput", "bad")
    edit(bad, **{field: value})
    records, errors = load_records(tmp_path)
    assert [record.point for record in records] == [good.stem]
    assert [error.field for error in errors] == [field]
    assert str(bad) in str(errors[0]) and f"'{field}'" in str(errors[0])


@pytest.mark.parametrize("content", ["", '{"schema": 1, "experi', "[]", "null", "\udcff"])
def test_a_file_that_is_no_record_is_named(put, tmp_path: Path, content: str) -> None:
    put("ruler", "good")
    bad = put("ruler", "bad")
    bad.write_bytes(content.encode("utf-8", "surrogateescape"))
    records, errors = load_records(tmp_path)
    assert [record.point for record in records] == ["good"]
    assert str(bad) in str(errors[0])


@pytest.mark.parametrize("experiment", ["throughput", "residency", "prediction", "ruler", "fidelity", "lm_eval"])
def test_each_row_field_is_required(put, rows, experiment: str) -> None:
    # Those that records of before do not have may be missing.
    required = [name for name, kind in ROW_FIELDS[experiment].items() if not kind.late]
    assert required
    for field in required:
        row = {key: value for key, value in rows[experiment][0].items() if key != field}
        with pytest.raises(RecordError, match=rf"rows\[0\]\.{field}'.* missing"):
            put(experiment, rows=[row])


def test_a_row_value_of_the_wrong_kind_is_named_with_what_is_allowed(put, rows) -> None:
    rows["ruler"][0]["score"] = 101
    with pytest.raises(RecordError, match=r"rows\[0\]\.score' is 101; it must be a number from 0 to 100"):
        put("ruler", rows=rows["ruler"])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("torch_threads", ..., "is missing; it must be a number"),
        ("dirty", "yes", "is 'yes'; it must be true, false or null"),
        ("gpu", [], "must be a list of one or more GPUs, or null"),
        ("gpu", [{"name": "NVIDIA H200"}], "must be a list of one or more GPUs, or null"),
    ],
)
def test_an_environment_without_what_it_must_hold_is_named(put, field: str, value, words: str) -> None:
    environment = {**read_record(put("toy")).environment, field: value}
    with pytest.raises(RecordError, match=rf"environment\.{field}'.*{words}"):
        put("toy", environment={key: item for key, item in environment.items() if item is not ...})


def test_a_record_of_the_schema_before_is_read(put) -> None:
    path = put("toy")
    environment = dict(read_record(path).environment)
    del environment["launcher"]
    edit(path, schema=1, environment=environment)
    assert read_record(path).environment["launcher"] == "none"


def test_a_record_of_schema_2_is_older_than_any_with_a_number(put) -> None:
    path = put("toy")
    edit(path, schema=2, number=...)
    assert (read_record(path).number, read_record(path).schema) == (0, 3)
    for committed in sorted((ROOT / "results").rglob("*.json")):
        written = json.loads(committed.read_text(encoding="utf-8"))
        assert read_record(committed).number == written.get("number", 0), committed
        assert ("number" in written) == (written["schema"] >= 3), committed


def test_a_task_without_data_has_no_score(put, rows) -> None:
    nothing = {"score": None, "scores": None, "ci95": None, "samples": 0}
    assert load_records(put("ruler", rows=[{**rows["ruler"][0], **nothing}]).parent)[0]


def test_an_invalid_record_leaves_the_old_file(put) -> None:
    path = put("toy", rows=[{"value": 1}])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        put("toy", rows=[{"value": float("nan")}])
    assert path.read_bytes() == before
    assert [item.name for item in path.parent.iterdir()] == [path.name]
