"""The recent window: the newest tokens' keys and values on the device, a ring indexed by position.

Position ``p`` lives in slot ``p % W``. The window holds positions ``[start_B, length_B)`` of each sequence. W is a
multiple of the chunk and ``start_B`` a chunk boundary, so a chunk never wraps around.
Suffixes: B sequences, K KV heads, W tokens of the window, T prompt tokens, X = K and V, C tokens of a chunk,
D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_prompt(window_KXWD: Tensor, start: int, kv_KXTD: Tensor) -> None:
    """Store a prompt's tokens from position ``start`` on, in one sequence's window."""
    slot_T = torch.arange(start, start + kv_KXTD.shape[2], device=kv_KXTD.device) % window_KXWD.shape[2]
    window_KXWD[:, :, slot_T] = kv_KXTD


def write_token(window_BKXWD: Tensor, position_B: Tensor, kv_BKXD: Tensor, where_B: Tensor) -> None:
    """Store one token of those sequences where ``where_B`` holds."""
    row_B = torch.arange(len(position_B), device=position_B.device)
    at = (row_B, slice(None), slice(None), position_B % window_BKXWD.shape[3])
    window_BKXWD[at] = torch.where(where_B[:, None, None, None], kv_BKXD, window_BKXWD[at])


def read_chunk(window_BKXWD: Tensor, start_B: Tensor, tokens: int) -> Tensor:
    """Record ``[B, K, 2, C, D]`` of the chunk that begins at position ``start_B``."""
    slot_BC = (start_B[:, None] + torch.arange(tokens, device=start_B.device)) % window_BKXWD.shape[3]
    row_B1 = torch.arange(len(start_B), device=start_B.device)[:, None]
    return window_BKXWD[row_B1, :, :, slot_BC].permute(0, 2, 3, 1, 4)


def filled_slots(tokens: int, start_B: Tensor, length_B: Tensor) -> Tensor:
    """Which of the window's ``tokens`` slots hold a token, bool ``[B, W]``."""
    slot_W = torch.arange(tokens, device=start_B.device)
    newest_BW = length_B[:, None] - 1 - (length_B[:, None] - 1 - slot_W) % tokens
    return newest_BW >= start_B[:, None]
