"""Execute every notebook from start to end: python -m experiments.notebooks [only=throughput]

They read committed records or run the tiny random model, and are committed without outputs.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from experiments.harness.environment import ROOT
from experiments.harness.options import read_options

FOLDER = ROOT / "notebooks"
# A cell may take as long as it takes: how fast a machine is does not decide whether a notebook works. Only a kernel
# that does not even answer is given up.
LIMITS = {"timeout": None, "startup_timeout": 1800, "iopub_timeout": 1800}


def main(arguments: list[str]) -> int:
    """Execute all or one; returns the exit code: 0, 1 if one fails or holds outputs, 2 for bad input."""
    try:
        only = read_options(arguments, {"only": ""})["only"]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    paths = [path for path in sorted(FOLDER.glob("*.ipynb")) if only in ("", path.stem)]
    problems = {path: problem(path) for path in paths}
    for path, text in problems.items():
        print(f"{path.relative_to(ROOT)}: {text or 'done'}")
    return 1 if any(problems.values()) or not paths else 0


def problem(path: Path) -> str | None:
    """What is wrong with a notebook: outputs in the file, or the error of a cell; None if nothing is."""
    notebook = nbformat.read(path, as_version=4)
    if has_outputs(notebook):
        return "holds outputs or execution counts; clear them before committing"
    # Through files and not through a port of this machine, to which anybody on it could connect.
    with tempfile.TemporaryDirectory() as sockets:
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        options: dict[str, Any] = {**LIMITS, "km": kernel}
        try:
            NotebookClient(notebook, resources={"metadata": {"path": str(ROOT)}}, **options).execute()
        except CellExecutionError as error:
            return str(error)
    return None


def has_outputs(notebook: Any) -> bool:
    """Whether any code cell was saved after it ran."""
    return any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
