"""Compile for Hopper, without a GPU, the kernels that ``CASES`` launch: ``python compile_for_hopper.py REPORT``.

A process of its own, for Triton decides when it is imported whether it interprets. Every launch goes as far as Triton's
own launcher goes before it needs a device: types, divisibility and constants of the arguments, PTX, machine code.
Nothing runs, so tensors keep what was in them. The report: the error of every case, and the kernels that were compiled.
"""

import importlib
import json
import pkgutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from drive import Drive
from test_layer import draw, make_model
from test_top import random_keys, selected
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import baselines.kernels
import dualdecoder.kernels
from dualdecoder.config import ModelConfig
from dualdecoder.kernels import layer
from dualdecoder.method import REGISTRY, method_class, method_config
from dualdecoder.model import random_decoder
from dualdecoder.step import decode_step

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Heads of an 8B model's group, three layers: some methods treat the first two in another way.
MODEL = ModelConfig("three-layers", 3, 64, 64, 8, 2, 128, 32, 8192)
# Variants of a method that launch kernels in another way than its defaults do.
VARIANTS = {"dualdecoder": {"urgent": "in_place"}, "specache": {"bits": 1}}
# What a program may use of a multiprocessor's memory.
SHARED_BYTES = 227 * 1024


class Hopper:
    """What Triton asks of its driver up to the launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def step(name: str, options: dict, dtype: torch.dtype) -> None:
    """A prompt and a decode step of a method."""
    sizes = {"batch": 2, "context": 8192, "dtype": dtype}
    method = method_class(name)(MODEL, method_config(name, options), **sizes, planned_for="cuda")
    Drive(method).prefill([600, 40])
    tokens_BR = torch.ones(2, method.rows, dtype=torch.int64)
    everyone_B = torch.ones(2, dtype=torch.bool)
    decode_step(random_decoder(MODEL, dtype), method, tokens_BR, torch.tensor([600, 40]), everyone_B)


def fused_layer(dtype: torch.dtype) -> None:
    """The model's own kernels."""
    model = make_model("qwen3", dtype, "cpu")
    x_BRE, o_BRHD = draw(2, 2, 80, like=model, seed=1), draw(2, 2, 6, 16, like=model, seed=2)
    layer.project(model.config, model.layers[0], x_BRE, model.rotation(torch.arange(4).view(2, 2)))
    layer.finish_layer(model.config, model.layers[0], x_BRE, o_BRHD)


def long_rows(dtype: torch.dtype) -> None:
    """A selection from rows that one program cannot hold, which only few contexts need; scores are fp32 always."""
    selected(random_keys(1, 2, 2, 1111, device="cpu"), 256, segment=512)


CASES: dict[str, Callable[[torch.dtype], None]] = {
    **{name: partial(step, name, {}) for name in REGISTRY},
    **{f"{name} {options}": partial(step, name, options) for name, options in VARIANTS.items()},
    "fused layer": fused_layer,
    "long rows": long_rows,
}


def compile_launches() -> set[str]:
    """Let every launch from now on compile only; the set receives the kernels' names."""
    triton.runtime.driver.set_active(Hopper())
    compiled, run = set(), JITFunction.run

    def compile_only(kernel: JITFunction, *args, grid, warmup, **options) -> None:
        shared = run(kernel, *args, grid=grid, warmup=True, **options).metadata.shared
        assert shared <= SHARED_BYTES, f"{kernel.__name__} takes {shared} bytes of shared memory"
        compiled.add(f"{kernel.__module__}.{kernel.__name__}")

    JITFunction.run = compile_only
    return compiled


def all_kernels() -> set[str]:
    """What is launched, by the convention of names, in both packages of kernels."""
    found = set()
    for package in (dualdecoder.kernels, baselines.kernels):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            functions = vars(importlib.import_module(info.name)).items()
            names = [name for name, f in functions if isinstance(f, JITFunction) and f.__module__ == info.name]
            found |= {f"{info.name}.{name}" for name in names if name.endswith("_kernel")}
    return found


def error_of(case: Callable[[torch.dtype], None], dtype: torch.dtype) -> str:
    """Empty if the case went through."""
    try:
        case(dtype)
    except Exception:
        return traceback.format_exc()
    return ""


def main(report: str) -> None:
    torch.set_num_threads(1)
    kernels, compiled = all_kernels(), compile_launches()
    errors, missing = {}, {}
    for name, dtype in DTYPES.items():
        compiled.clear()
        errors |= {f"{case} {name}": error_of(run, dtype) for case, run in CASES.items()}
        missing[name] = sorted(kernels - compiled)
    Path(report).write_text(json.dumps({"errors": errors, "missing": missing}))


if __name__ == "__main__":
    main(sys.argv[1])
