"""Every kernel compiles for Hopper, on a machine without a GPU too: what runs in the interpreter may not compile."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from compile_for_hopper import CASES, DTYPES

TESTS = Path(__file__).resolve().parents[1]


class Compiler:
    """``compile_for_hopper.py``, started for the first question, and again if one has ended it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, question: list | None) -> Any:
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the compiler ended with status {self.process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS.parent, TESTS / "kernels", TESTS / "baselines")))
        command = [sys.executable, str(TESTS / "kernels" / "compile_for_hopper.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=env | {"CUDA_VISIBLE_DEVICES": ""}, **pipes)


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    try:
        triton.knobs.nvidia.ptxas  # noqa: B018
    except RuntimeError as error:
        pytest.skip(f"Triton has no assembler here: {error}")
    one = Compiler()
    yield one
    one.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str, dtype: str, compiler: Compiler) -> None:
    error, kernels = compiler.ask([case, dtype, False])
    assert not error, error
    assert kernels


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_kernel_is_left_out(dtype: str, compiler: Compiler) -> None:
    launched = {kernel for case in CASES for kernel in compiler.ask([case, dtype, True])[1]}
    assert set(compiler.ask(None)) - launched == set()
