"""Decode steps as CUDA graphs: capture once, replay, with one eager fallback.

Suffixes: B sequences, R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdecoder.method import KVMethod
from dualdecoder.model import Decoder
from dualdecoder.step import decode_step

# Full steps run eagerly first: kernels get compiled, and the method's first-step bookkeeping is over.
WARMUP_STEPS = 2


class StepRunner:
    """Runs decode steps of one batch. Steps of the method's full number of rows are replayed from a graph.

    Eager on a CPU, for a method that is not ``graphable``, for the warm-up, and while somebody observes the method.
    """

    def __init__(self, model: Decoder, method: KVMethod) -> None:
        self.model, self.method = model, method
        self.eager = model.device.type != "cuda" or not method.graphable
        self.full_steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens_BR: Tensor, lengths_B: Tensor, commit_B: Tensor) -> Tensor:
        """fp32 logits ``[B, R, V]`` that stay valid after the next step."""
        is_full = tokens_BR.shape[1] == self.method.rows
        # What observes is Python, which a replay would not run and a capture would keep.
        if self.eager or self.method.observe is not None or not is_full or self.full_steps < WARMUP_STEPS:
            self.full_steps += is_full
            return decode_step(self.model, self.method, tokens_BR, lengths_B, commit_B)
        if self.graph is None:
            self._capture(tokens_BR, lengths_B, commit_B)
        for static, value in zip(self.inputs, (tokens_BR, lengths_B, commit_B), strict=True):
            static.copy_(value)
        self.graph.replay()
        return self.logits_BRV.clone()

    def _capture(self, *inputs: Tensor) -> None:
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        self.graph = torch.cuda.CUDAGraph()
        # A capture records launches without running them, so the method's device state does not move.
        with torch.cuda.graph(self.graph):
            self.logits_BRV = decode_step(self.model, self.method, *self.inputs)
