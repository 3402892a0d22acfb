"""Whole methods through their kernels against the same methods in PyTorch, step by step."""

import pytest
import torch
from drive import make

from baselines.h2o import H2O, H2OConfig
from baselines.infinigen import InfiniGen, InfiniGenConfig
from baselines.streaming_llm import StreamingLLM, StreamingLLMConfig

SHAPE = {"query_heads": 6, "kv_heads": 2, "head_dim": 16, "layers": 3}
METHODS = {
    "infinigen": (InfiniGen, InfiniGenConfig(alpha=2.0, ratio=0.5, cap=21, dense_layers=2)),
    "infinigen that covers": (InfiniGen, InfiniGenConfig(alpha=1e9, cap=500, dense_layers=1)),
    "infinigen with shared host memory": (InfiniGen, InfiniGenConfig(cap=30, dense_layers=1, host_sequences=2)),
    "h2o": (H2O, H2OConfig(23, 14)),
    "h2o that covers": (H2O, H2OConfig(120, 100)),
    "streaming_llm": (StreamingLLM, StreamingLLMConfig(3, 37)),
    "streaming_llm that covers": (StreamingLLM, StreamingLLMConfig(4, 500)),
}


@pytest.mark.parametrize("name", METHODS)
def test_kernels_do_what_the_reference_does(name: str, device: str) -> None:
    reference = make(*METHODS[name], 3, 200, **SHAPE)
    kernels = make(*METHODS[name], 3, 200, device, with_kernels=True, **SHAPE)
    for drive in (reference, kernels):
        drive.prefill([1, 90, 38])
    for step in range(4):
        commit = [True, step != 1, step > 1]
        for (_, expected), (_, got) in zip(reference.step(commit), kernels.step(commit), strict=True):
            torch.testing.assert_close(got.cpu(), expected, atol=1e-4, rtol=1e-4)
