"""The full KV in host memory, one record a chunk and KV head: K then V, contiguous (4 KiB at D 128 in 16 bits).

Suffixes: L layers, B sequences, K KV heads, N chunks, X = the two halves K and V, C tokens of a chunk, D head size,
S chunks of one request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.ledger import Ledger


class HostStore:
    """Chunk records of all layers, ``[B, K, N, 2, C, D]`` a layer."""

    def __init__(
        self, model: ModelConfig, batch: int, chunks: int, chunk: int, dtype: torch.dtype, ledger: Ledger
    ) -> None:
        shape = (batch, model.kv_heads, chunks, 2, chunk, model.head_dim)
        self.records = [ledger.on_host("kv", shape, dtype) for _ in range(model.layers)]

    @property
    def record_bytes(self) -> int:
        """Bytes of one record: what one chunk of one KV head costs on the link."""
        return self.records[0][0, 0, 0].nbytes

    def write_prompt(self, layer: int, sequence: int, records_KNXCD: Tensor) -> None:
        """Store a prompt's first chunks."""
        self.records[layer][sequence, :, : records_KNXCD.shape[1]] = records_KNXCD

    def write_chunk(self, layer: int, chunk_B: Tensor, record_BKXCD: Tensor, where_B: Tensor) -> None:
        """Store one more chunk of those sequences where ``where_B`` holds, at chunk number ``chunk_B``."""
        row_B = torch.arange(chunk_B.shape[0], device=chunk_B.device)
        records = self.records[layer]
        kept = records[row_B, :, chunk_B]
        records[row_B, :, chunk_B] = torch.where(where_B[:, None, None, None, None], record_BKXCD, kept)

    def read(self, layer: int, chunk_BKS: Tensor) -> Tensor:
        """Records ``[B, K, S, 2, C, D]`` of the chunk numbers; entries below 0 give chunk 0."""
        records = self.records[layer]
        b = torch.arange(records.shape[0], device=records.device)[:, None, None]
        k = torch.arange(records.shape[1], device=records.device)[None, :, None]
        return records[b, k, chunk_BKS.clamp(min=0)]
