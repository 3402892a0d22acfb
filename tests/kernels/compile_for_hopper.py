"""Compile for Hopper, without a GPU, the kernels that ``CASES`` launch: ``python compile_for_hopper.py``.

A process of its own, for Triton decides when it is imported whether it interprets. It answers one line of JSON with
another: a case and a dtype with the error, if any, and the names of the kernels that were launched; null with the names
of all there are. Every launch goes as far as Triton's own launcher goes before it needs a device: types, divisibility
and constants of the arguments, PTX, machine code; or, if only names are asked for, not even there. Nothing runs, so
tensors keep what was in them.
"""

import importlib
import json
import pkgutil
import sys
import traceback
from collections.abc import Callable
from functools import partial

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


class Launches:
    """Takes the place of every launch from now on."""

    def __init__(self) -> None:
        self.compile, self.names, self.only_names = JITFunction.run, set(), False
        triton.runtime.driver.set_active(Hopper())
        JITFunction.run = lambda kernel, *args, **options: self.launch(kernel, *args, **options)

    def launch(self, kernel: JITFunction, *args, warmup: bool, **options) -> None:
        self.names.add(f"{kernel.__module__}.{kernel.__name__}")
        if self.only_names:
            return
        shared = self.compile(kernel, *args, warmup=True, **options).metadata.shared
        assert shared <= SHARED_BYTES, f"{kernel.__name__} takes {shared} bytes of shared memory"

    def of(self, case: str, dtype: str, only_names: bool) -> tuple[str, list[str]]:
        """The error of a case, empty if there was none, and what it launched."""
        self.names, self.only_names = set(), only_names
        try:
            CASES[case](DTYPES[dtype])
        except Exception:
            return traceback.format_exc(), sorted(self.names)
        return "", sorted(self.names)


def all_kernels() -> set[str]:
    """What is launched, by the convention of names, in both packages of kernels."""
    found = set()
    for package in (dualdecoder.kernels, baselines.kernels):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            functions = vars(importlib.import_module(info.name)).items()
            names = [name for name, f in functions if isinstance(f, JITFunction) and f.__module__ == info.name]
            found |= {f"{info.name}.{name}" for name in names if name.endswith("_kernel")}
    return found


def main() -> None:
    torch.set_num_threads(1)
    # What is printed on the way is no answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    launches = Launches()
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(launches.of(*asked) if asked else sorted(all_kernels())), file=answers, flush=True)


if __name__ == "__main__":
    main()
