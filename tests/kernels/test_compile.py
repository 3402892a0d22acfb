"""Every kernel compiles for Hopper, on a machine without a GPU too: what runs in the interpreter may not compile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from compile_for_hopper import CASES, DTYPES

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What ``compile_for_hopper.py`` reports; up to a minute if Triton's cache on disk has none of the kernels."""
    try:
        triton.knobs.nvidia.ptxas  # noqa: B018
    except RuntimeError as error:
        pytest.skip(f"Triton has no assembler here: {error}")
    file = tmp_path_factory.mktemp("hopper") / "report.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS.parent, TESTS / "kernels", TESTS / "baselines")))
    script = TESTS / "kernels" / "compile_for_hopper.py"
    subprocess.run([sys.executable, script, file], env=env | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    return json.loads(file.read_text())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str, dtype: str, report: dict) -> None:
    error = report["errors"][f"{case} {dtype}"]
    assert not error, error


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_kernel_is_left_out(dtype: str, report: dict) -> None:
    assert report["missing"][dtype] == []
