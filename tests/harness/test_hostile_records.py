"""One record, whatever it holds, never ends the report: it is named, and the others are there."""

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from experiments import report
from experiments.harness import untrusted
from experiments.harness.records import load_records
from experiments.report import build_report
from experiments.reporting import tables
from experiments.reporting.collect import Collection, collect, result_folders
from experiments.reporting.drawing import MOST_PANELS
from experiments.reporting.figures import DRAWINGS, draw_figure
from experiments.reporting.paper import OUTPUTS, output_figure
from experiments.reporting.tables import MOST_PARTS, TABLES, parts

DEEP = "[" * 100_000 + "]" * 100_000
MARKUP = "\x1b[31m\n# <script>alert(1)</script> | [a](http://b) `c` **d** $x$ \\input{e} _f_ \u202e\x9b"
# Of a line of Markdown that the report writes.
BEGINNINGS = ("#", "|", "no records", "none", "quality", "Hardware", "planned")
VALUES: list[Any] = [None, True, -1, 0, 2**62, 1e308, "", MARKUP, "x" * 10**5, [], [None], {}, {"a": {}}, [[1]]]


@pytest.fixture
def put_good(put) -> None:
    put("ruler", "good")


def named(folder: Path) -> list[str]:
    return [error.path.name for error in load_records(folder)[1]]


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        f'{{"a": {DEEP}}}',
        '{"schema": 2, "seconds": ' + "9" * 400 + "}",
        '{"seconds": ' + "9" * 10**6 + "}",
        '{"seconds": 1e999}',
        '{"seconds": NaN}',
        '{"seconds": -Infinity}',
        '{"command": "\\ud800"}',
        '{"a":' * 40 + "1" + "}" * 40,
    ],
    ids=lambda content: content[:12],
)
def test_a_file_of_numbers_or_depths_beyond_bounds_is_named(put_good, tmp_path: Path, content: str) -> None:
    (tmp_path / "ruler" / "bad.json").write_text(content)
    assert named(tmp_path) == ["bad.json"]
    assert [record.point for record in load_records(tmp_path)[0]] == ["good"]
    assert all(len(str(error)) < 1000 for error in load_records(tmp_path)[1])


def test_what_is_no_file_is_named_and_not_waited_for(put_good, tmp_path: Path) -> None:
    folder = tmp_path / "ruler"
    os.mkfifo(folder / "fifo.json")
    (folder / "folder.json").mkdir()
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "gone.json").symlink_to("nowhere")
    (folder / "lost").symlink_to("nowhere")
    with (folder / "huge.json").open("wb") as file:
        file.truncate(2**30)
    assert sorted(named(tmp_path)) == ["fifo.json", "folder.json", "gone.json", "huge.json", "loop.json", "lost"]
    assert len(load_records(tmp_path)[0]) == 1


def test_no_more_is_read_than_a_record_may_have(put_good, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(untrusted, "MOST_BYTES", 100)
    assert named(tmp_path) == ["good.json"]


def test_symlinked_folders_are_followed_once(put, tmp_path: Path) -> None:
    put("ruler")
    results = tmp_path / "results"
    (results / "mine").mkdir(parents=True)
    (results / "mine" / "linked").symlink_to(tmp_path / "ruler")
    (results / "all").symlink_to(results / "mine")
    (tmp_path / "ruler" / "back").symlink_to(tmp_path / "ruler")
    assert [len(load_records(folder)[0]) for folder in result_folders(results)] == [1, 1]


def every_place(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in every_place(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("experiment", ["throughput", "residency", "prediction", "ruler", "fidelity", "lm_eval"])
def test_any_value_anywhere_is_used_or_named(put, tmp_path: Path, experiment: str, monkeypatch, capsys) -> None:
    """Each place of a record in turn gets each kind of value, and all of them are reported together."""
    good = json.loads(put(experiment, "good").read_text())
    small = {**good, "rows": good["rows"][:2]}
    places = [place for place in every_place(small) if place]
    for number, place in enumerate(places):
        for kind, value in enumerate(VALUES):
            changed = replaced(small, place, value)
            if isinstance(changed["config"], dict):
                changed["config"] = {**changed["config"], "number": f"{number}-{kind}"}
            (tmp_path / experiment / f"{number}-{kind}.json").write_text(json.dumps(changed))
    monkeypatch.setattr(report, "write_figure", lambda *arguments: None)
    monkeypatch.setattr(report, "write_outputs", lambda *arguments: [])
    build_report(tmp_path)
    output = capsys.readouterr().out
    collection = collect(tmp_path)
    assert len(collection.errors) > len(places) and "good" in {record.point for record in collection.ok}
    check_texts(tmp_path, output)
    check_figures(collection)


def check_texts(folder: Path, output: str) -> None:
    written = {path: path.read_text() for kind in ("md", "tex", "csv") for path in folder.rglob(f"*.{kind}")}
    for text in [output, *written.values()]:
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    for path, text in written.items():
        if path.suffix == ".md":
            assert "<script" not in text and "](http" not in text.replace("\\](", "") and " `c`" not in text
            assert all(line.startswith(BEGINNINGS) or not line for line in text.splitlines())
        if path.suffix == ".tex":
            assert "\\input{" not in text


def check_figures(collection: Collection) -> None:
    for name in DRAWINGS:
        if sections := collection.sections(name):
            draw_figure(name, sections)
    for output in OUTPUTS:
        output_figure(output.name, collection)


def test_a_null_message_is_named(put, tmp_path: Path) -> None:
    path = put("ruler", status="failed", error={"type": "E", "message": "x"}, rows=[])
    path.write_text(path.read_text().replace('"message": "x"', '"message": null'))
    (error,) = load_records(tmp_path)[1]
    assert "field 'error.message' is None; it must be a text" in str(error)


def test_a_method_may_be_called_as_a_column_is(put, rows, tmp_path: Path) -> None:
    put("ruler", rows=[{**row, "method": name} for row in rows["ruler"] for name in ("task", "samples", "method")])
    (part,) = parts("ruler", collect(tmp_path).sections("ruler")[0])
    assert list(part.texts.columns)[:2] == ["task", "samples"] and len(part.texts.columns) == 5


def test_the_work_for_thousands_of_lengths_is_bounded(put, rows, tmp_path: Path, monkeypatch) -> None:
    """Two thousand tables are not printed, nor two thousand panels drawn."""
    calls = []
    table = TABLES["ruler"]
    counting = tables.Table(table.numbers, lambda group: calls.append(1) or table.texts(group), table.apart, table.unit)
    monkeypatch.setitem(TABLES, "ruler", counting)
    put("ruler", rows=[{**row, "length": 1000 + n} for row in rows["ruler"] for n in range(2000)])
    sections = collect(tmp_path).sections("ruler")
    made = parts("ruler", sections[0])
    assert len(calls) == MOST_PARTS and len(made) == MOST_PARTS + 1
    assert f"{MOST_PARTS} of 2000 tables, at equal distances" in made[-1].texts.iloc[0, 0]
    figure = draw_figure("ruler", sections)
    assert len(figure.axes) == MOST_PANELS
    assert "drawn: 12 of 2000, all are in the table" in figure.subfigs[0].get_suptitle().replace("\n", " ")
    assert len(tables.numbers("ruler", sections[0])) == 4000
