"""Tables on a terminal: every digit of every cell, at any width, and nothing of a record that steers it."""

import re
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from experiments.harness.environment import ROOT
from experiments.reporting.collect import collect
from experiments.reporting.fitting import bands
from experiments.reporting.tables import TABLES, parts
from experiments.reporting.terminal import print_sections

NUMBER = re.compile(r"\d[\d.,]*")


def printed(folder: Path, name: str, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        print_sections(console, name, collect(folder).sections(name))
    return capture.get()


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_every_number_of_the_committed_tables_is_printed_whole(machine: str, width: int) -> None:
    folder = ROOT / "results" / machine
    collection = collect(folder)
    for name in TABLES:
        sections = collection.sections(name)
        output = printed(folder, name, width) if sections else ""
        assert max(map(len, output.splitlines()), default=0) <= width
        assert "…" not in output
        shown = NUMBER.findall(output)
        for section in sections:
            for part in parts(name, section):
                for cell in part.texts.to_numpy().ravel():
                    assert set(NUMBER.findall(cell)) <= set(shown), (name, cell)
                assert all(word in output for column in part.texts.columns for word in column.split())


def test_a_number_of_gib_is_whole_at_80_columns(put, rows, tmp_path: Path) -> None:
    full, _ = rows["residency"]
    put("residency", rows=[{**full, "gpu_total": 110.98 * 2**30, "largest_batch": 123456}])
    output = printed(tmp_path, "residency", 80)
    assert "110.98" in output and "123456" in output and "does not fit" not in output


@settings(max_examples=60, deadline=None)
@given(
    st.integers(40, 120),
    st.lists(st.lists(st.decimals(0, 10**9, places=3).map(str), min_size=1, max_size=12), min_size=1, max_size=3),
)
def test_bands_hold_every_column_once_and_fit(width: int, rows: list[list[str]]) -> None:
    columns = min(map(len, rows))
    texts = pd.DataFrame({"method": [f"m{n}" for n in range(len(rows))]})
    for place in range(columns):
        texts[f"c{place}"] = [row[place] for row in rows]
    made = bands(texts, width)
    assert [name for band in made for name in band.columns[1:]] == list(texts.columns[1:])
    assert all(band.columns[0] == "method" for band in made)
    for band in made:
        widths = [max(len(name), *map(len, band[name])) for name in band.columns]
        assert sum(widths) + 2 * (len(widths) - 1) <= width


def test_texts_of_a_record_do_not_steer_the_terminal(put, rows, tmp_path: Path) -> None:
    hostile = "\x1b[31m\x9b2J\u202e[bold]x[/bold]\r\n[link=http://a]b"
    put(
        "ruler", rows=[{**row, "model": hostile, "task": task} for row, task in product(rows["ruler"], [hostile, "vt"])]
    )
    output = printed(tmp_path, "ruler", 100)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", output)
    assert "[bold]x[/bold]" in output and "[link=http://a]b" in output.replace("\n", " ")
