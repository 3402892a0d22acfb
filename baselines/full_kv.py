"""Dense KV on the device: the exact reference, limited by memory.

Suffixes: B sequences, R rows, T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.dense import DenseMethod
from dualdecoder.config import MethodConfig
from dualdecoder.errors import require
from dualdecoder.method import Capabilities


@dataclass(frozen=True)
class FullKVConfig(MethodConfig):
    """Full KV has no settings."""


class FullKV(DenseMethod):
    """All keys and values of all tokens on the device; every step attends to all of them."""

    config_class = FullKVConfig
    capabilities = Capabilities(exact=True, recalls=True, offloads=False)
    graphable = True

    def allocate(self) -> None:
        super().allocate()
        shape = (self.batch, *self.cache_shape)
        self.kv = [self.ledger.on_device("kv", shape, self.dtype) for _ in range(self.model.layers)]

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        self.kv[layer][sequence, :, :, : len(k_TKD)] = torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3)
        self.length_B[sequence] = len(k_TKD)

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        kv = self.kv[layer]
        return self.attention(q_BRHD, k_BRKD, v_BRKD, kv, kv, self.length_B, self.commit_B)

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random keys and values in place."""
        require(0 < tokens < self.context, "tokens", tokens, f"1 to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)
        for kv in self.kv:
            kv.normal_(generator=generator)
        self.length_B.fill_(tokens)
