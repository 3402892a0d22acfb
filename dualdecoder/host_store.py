"""KV in host memory, one record a chunk and KV head: K then V, contiguous (4 KiB at D 128 in 16 bits), or V alone.

Suffixes: A host sequences, B sequences, K KV heads, N chunks, X = the halves K and V, or V alone, C tokens of a chunk,
D head size, S chunks of one request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.ledger import Ledger


class HostStore:
    """Chunk records of all layers, ``[A, K, N, X, C, D]`` a layer. X is ``halves``: 2 for K and V, 1 for V alone.

    There are normally as many host sequences (A) as sequences. With fewer, sequence b uses host sequence b modulo A:
    only for measuring transfers of more sequences than the host has memory for.
    """

    def __init__(
        self, model: ModelConfig, sequences: int, chunks: int, chunk: int, dtype: torch.dtype, ledger: Ledger,
        halves: int = 2,
    ) -> None:  # fmt: skip
        shape = (sequences, model.kv_heads, chunks, halves, chunk, model.head_dim)
        self.records = ledger.on_host("kv", model.layers, shape, dtype)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record: what one chunk of one KV head costs on the link."""
        return self.records[0][0, 0, 0].nbytes

    def write_prompt(self, layer: int, sequence: int, records_KNXCD: Tensor) -> None:
        """Store a prompt's first chunks; from a GPU the copy is asynchronous on the current stream."""
        for records_NXCD, kept_NXCD in zip(records_KNXCD, self._of(layer, sequence), strict=True):
            # Head by head both sides are dense: one plain copy each.
            kept_NXCD[: len(records_NXCD)].copy_(records_NXCD, non_blocking=True)

    def write_chunk(self, layer: int, chunk_B: Tensor, record_BKXCD: Tensor, where_B: Tensor) -> None:
        """Store one more chunk of those sequences where ``where_B`` holds, at chunk number ``chunk_B``."""
        records = self.records[layer]
        at = (torch.arange(chunk_B.shape[0]) % len(records), slice(None), chunk_B)
        records[at] = torch.where(where_B[:, None, None, None, None], record_BKXCD, records[at])

    def fill_normal(self, layer: int, generator: torch.Generator) -> None:
        """Random values, made on the generator's device, for measuring without a prompt."""
        for records in self.records[layer]:
            values = torch.empty(records.shape, dtype=records.dtype, device=generator.device)
            records.copy_(values.normal_(generator=generator), non_blocking=True)

    def read(self, layer: int, chunk_BKS: Tensor, first: int = 0) -> Tensor:
        """Records ``[B, K, S, X, C, D]`` of the chunk numbers, for sequences from ``first`` on.

        Entries below 0 give chunk 0.
        """
        return read_records(self.records[layer], chunk_BKS, first)

    def _of(self, layer: int, sequence: int) -> Tensor:
        return self.records[layer][sequence % len(self.records[layer])]


def read_records(records_AKNXCD: Tensor, chunk_BKS: Tensor, first: int = 0) -> Tensor:
    """Records ``[B, K, S, X, C, D]`` of one layer, sequence b's from ``first + b`` modulo A; below 0, chunk 0's."""
    b = ((torch.arange(chunk_BKS.shape[0]) + first) % len(records_AKNXCD))[:, None, None]
    k = torch.arange(records_AKNXCD.shape[1])[None, :, None]
    return records_AKNXCD[b, k, chunk_BKS.clamp(min=0)]
