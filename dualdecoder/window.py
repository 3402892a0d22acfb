"""The recent window: the newest tokens' keys and values on the device, a ring indexed by position.

Suffixes: B sequences, K KV heads, W tokens of the window, T prompt tokens, X = K and V, C tokens of a chunk,
D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.ledger import Ledger


class RecentWindow:
    """Position ``p`` lives in slot ``p % W``. It holds positions ``[start_B, length_B)`` of each sequence.

    W is a multiple of the chunk and ``start_B`` a chunk boundary, so a chunk never wraps around.
    """

    def __init__(self, model: ModelConfig, batch: int, tokens: int, dtype: torch.dtype, ledger: Ledger) -> None:
        shape = (batch, model.kv_heads, 2, tokens, model.head_dim)
        self.tokens = tokens
        self.layers = [ledger.on_device("window", shape, dtype) for _ in range(model.layers)]

    def write_prompt(self, layer: int, sequence: int, start: int, kv_KXTD: Tensor) -> None:
        """Store a prompt's tokens from position ``start`` on."""
        slot_T = torch.arange(start, start + kv_KXTD.shape[2], device=kv_KXTD.device) % self.tokens
        self.layers[layer][sequence][:, :, slot_T] = kv_KXTD

    def write_token(self, layer: int, position_B: Tensor, kv_BKXD: Tensor, where_B: Tensor) -> None:
        """Store one token of those sequences where ``where_B`` holds."""
        row_B, slot_B = torch.arange(len(position_B), device=position_B.device), position_B % self.tokens
        kept = self.layers[layer][row_B, :, :, slot_B]
        self.layers[layer][row_B, :, :, slot_B] = torch.where(where_B[:, None, None, None], kv_BKXD, kept)

    def chunk(self, layer: int, start_B: Tensor, tokens: int) -> Tensor:
        """Record ``[B, K, 2, C, D]`` of the chunk that begins at position ``start_B``."""
        slot_BC = (start_B[:, None] + torch.arange(tokens, device=start_B.device)) % self.tokens
        row_B1 = torch.arange(len(start_B), device=start_B.device)[:, None]
        return self.layers[layer][row_B1, :, :, slot_BC].permute(0, 2, 3, 1, 4)

    def filled(self, start_B: Tensor, length_B: Tensor) -> Tensor:
        """Which slots hold a token, bool ``[B, W]``."""
        slot_W = torch.arange(self.tokens, device=start_B.device)
        newest_BW = length_B[:, None] - 1 - (length_B[:, None] - 1 - slot_W) % self.tokens
        return newest_BW >= start_B[:, None]
