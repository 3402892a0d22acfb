"""Every notebook runs from start to end and is committed without outputs; one that does not is named."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from experiments.harness.environment import ROOT
from experiments.notebooks import FOLDER, has_outputs, main, problem

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_the_promised_notebooks_are_there() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"throughput", "residency", "prediction", "quality", "add_a_method"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    assert problem(path) is None
    assert not list(ROOT.glob("kernel-ipc*")), "sockets of the kernel were left behind"


def test_outputs_are_seen() -> None:
    assert not has_outputs(new_notebook(cells=[new_code_cell("1")]))
    assert has_outputs(new_notebook(cells=[new_code_cell("1", outputs=[new_output("stream", text="1")])]))
    assert has_outputs(new_notebook(cells=[new_code_cell("1", execution_count=1)]))


def test_an_error_in_a_cell_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "bad.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 / 0")]), path)
    assert "ZeroDivisionError" in str(problem(path))


def test_a_name_without_a_notebook_is_an_error() -> None:
    assert main(["only=nothing"]) == 1
