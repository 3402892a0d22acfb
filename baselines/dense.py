"""What methods with a dense cache share: exact attention over it and the commit of the new token, and their lengths.

Attention and commit are PyTorch on a CPU, and on a GPU one Triton kernel.

Suffixes: A sequences of the home, B sequences, R rows, H query heads, K KV heads, D head size, P tokens of capacity,
X = K and V.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dualdecoder.attention import step_attention
from dualdecoder.config import ModelConfig
from dualdecoder.ledger import Ledger
from dualdecoder.method import KVMethod


class DenseAttention(Protocol):
    """Attention of one layer; the output may live in a workspace that the next call overwrites."""

    def __call__(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, past_BKXPD: Tensor, home_AKXPD: Tensor,
        length_B: Tensor, commit_B: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attend to the first ``length_B`` tokens of the past and, causally, to the rows themselves; ``[B, R, H, D]``.

        Then, where ``commit_B`` holds, row 0's key and value become token ``length_B`` of home sequence ``b % A``.
        """


def dense_attention_for(
    device_type: str, model: ModelConfig, batch: int, rows: int, context: int, dtype: torch.dtype, ledger: Ledger
) -> DenseAttention:
    """The implementation for a type of device. Triton is imported only for a GPU."""
    if device_type == "cuda":
        return TritonDenseAttention(model, batch, rows, context, dtype, ledger)
    return ReferenceDenseAttention(context, ledger)


class ReferenceDenseAttention:
    """PyTorch, for a CPU."""

    def __init__(self, context: int, ledger: Ledger) -> None:
        self.position_P = ledger.on_device("tables", (context,), torch.int64)
        torch.arange(context, device=ledger.device, out=self.position_P)

    def __call__(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, past_BKXPD: Tensor, home_AKXPD: Tensor,
        length_B: Tensor, commit_B: Tensor,
    ) -> Tensor:  # fmt: skip
        allowed_BKP = (self.position_P < length_B[:, None])[:, None].expand(-1, k_BRKD.shape[2], -1)
        o_BRHD = step_attention(q_BRHD, k_BRKD, v_BRKD, past_BKXPD, allowed_BKP)
        self._commit(torch.stack((k_BRKD[:, 0], v_BRKD[:, 0]), dim=2), home_AKXPD, length_B, commit_B)
        return o_BRHD

    def _commit(self, kv_BKXD: Tensor, home_AKXPD: Tensor, length_B: Tensor, commit_B: Tensor) -> None:
        # A sequence that has ended may stand at the end of its capacity; its row is written nowhere.
        slot_B = length_B.clamp(max=len(self.position_P) - 1)
        at = (torch.arange(len(slot_B), device=slot_B.device) % len(home_AKXPD), slice(None), slice(None), slot_B)
        home_AKXPD[at] = torch.where(commit_B[:, None, None, None], kv_BKXD, home_AKXPD[at])


class TritonDenseAttention:
    """The kernel with its workspaces, allocated once, so that a step can be captured in a CUDA graph."""

    def __init__(
        self, model: ModelConfig, batch: int, rows: int, context: int, dtype: torch.dtype, ledger: Ledger
    ) -> None:
        from baselines.kernels.dense_attention import allocate_workspace

        self.workspace = allocate_workspace(ledger, batch, model.kv_heads, model.head_dim, context)
        self.output = ledger.on_device("workspace", (batch * rows * model.query_heads * model.head_dim,), dtype)

    def __call__(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, past_BKXPD: Tensor, home_AKXPD: Tensor,
        length_B: Tensor, commit_B: Tensor,
    ) -> Tensor:  # fmt: skip
        from baselines.kernels.dense_attention import Cache, dense_attention

        cache = Cache(past_BKXPD, home_AKXPD, length_B, commit_B)
        o_BRHD = self.output[: q_BRHD.numel()].view(q_BRHD.shape)
        return dense_attention(q_BRHD, k_BRKD, v_BRKD, cache, self.workspace, o_BRHD)


class DenseMethod(KVMethod):
    """A method whose every step attends to all tokens; subclasses say where these lie."""

    devices = ("cpu", "cuda")

    def allocate(self) -> None:
        self.length_B = self.ledger.on_device("tables", (self.batch,), torch.int64)
        self.attention = dense_attention_for(
            self.device_type, self.model, self.batch, self.rows, self.context, self.dtype, self.ledger
        )

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """One layer's cache of one sequence, ``[K, 2, P, D]``: attention reads a head's keys, then its values."""
        return (self.model.kv_heads, 2, self.context, self.model.head_dim)

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        self.commit_B = commit_B

    def end_step(self) -> None:
        self.length_B += self.commit_B

    def read_bytes(self) -> int:
        token_bytes = self.model.layers * self.model.kv_heads * 2 * self.model.head_dim * self.dtype.itemsize
        return int(self.length_B.sum()) * token_bytes
