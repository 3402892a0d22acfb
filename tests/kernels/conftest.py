"""Kernel tests run on the GPU if there is one, else in Triton's interpreter on the CPU (``tests/interpreter.py``)."""

import inspect
from functools import cache

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """At every call of a device function the interpreter looks through Triton's language for what it has to replace.

    What it finds depends on the module alone: looked up once, the tests take a fifth less time.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def names(package) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package, builder, scope) -> None:
        for name in names(package):
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
