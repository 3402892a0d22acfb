"""Dense KV on the device: the exact reference, limited by memory.

Suffixes: B sequences, R rows, T tokens, H query heads, K KV heads, D head size, P tokens of capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.attention import step_attention
from dualdecoder.config import MethodConfig
from dualdecoder.method import Capabilities, KVMethod


@dataclass(frozen=True)
class FullKVConfig(MethodConfig):
    """Full KV has no settings."""


class FullKV(KVMethod):
    """All keys and values of all tokens on the device; every step attends to all of them."""

    config_class = FullKVConfig
    capabilities = Capabilities(exact=True, recalls=True, offloads=False)

    def allocate(self) -> None:
        model = self.model
        shape = (self.batch, model.kv_heads, 2, self.context, model.head_dim)
        self.kv = [self.ledger.on_device("kv", shape, self.dtype) for _ in range(model.layers)]
        self.length_B = self.ledger.on_device("tables", (self.batch,), torch.int64)
        self.position_P = self.ledger.on_device("tables", (self.context,), torch.int64)
        torch.arange(self.context, device=self.ledger.device, out=self.position_P)

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        self.kv[layer][sequence, :, :, : len(k_TKD)] = torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3)
        self.length_B[sequence] = len(k_TKD)

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        self.commit_B = commit_B

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        past_BKXPD = self.kv[layer]
        allowed_BKP = (self.position_P < self.length_B[:, None])[:, None].expand(-1, self.model.kv_heads, -1)
        o_BRHD = step_attention(q_BRHD, k_BRKD, v_BRKD, past_BKXPD, allowed_BKP)
        self._commit(past_BKXPD, torch.stack((k_BRKD[:, 0], v_BRKD[:, 0]), dim=2))
        return o_BRHD

    def _commit(self, past_BKXPD: Tensor, kv_BKXD: Tensor) -> None:
        # A sequence that has ended may stand at the end of its capacity; its row is written nowhere.
        slot_B = self.length_B.clamp(max=self.context - 1)
        row_B = torch.arange(self.batch, device=slot_B.device)
        kept_BKXD = past_BKXPD[row_B, :, :, slot_B]
        past_BKXPD[row_B, :, :, slot_B] = torch.where(self.commit_B[:, None, None, None], kv_BKXD, kept_BKXD)

    def read_bytes(self) -> int:
        token_bytes = self.kv[0][0, :, :, 0].nbytes * self.model.layers
        return int(self.length_B.sum()) * token_bytes

    def end_step(self) -> None:
        self.length_B += self.commit_B
