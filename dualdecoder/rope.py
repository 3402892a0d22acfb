"""Rotary position embedding: default, linear, Llama-3.1, YaRN and per-pair (longrope) frequency scaling.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); the Llama 3.1 model card's frequency rule.
Suffixes: B sequences, R rows, H heads, D head size, P = D / 2 frequency pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualdecoder.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, fp32 ``[D/2]``, and the factor by which cos and sin are scaled."""
    exponent_P = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base_P = 1.0 / float(rope.theta) ** exponent_P
    return _scaled(rope, base_P, head_dim), rope.scale


def _scaled(rope: RopeConfig, base_P: Tensor, head_dim: int) -> Tensor:
    if rope.kind == "linear":
        return base_P / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base_P)
    if rope.kind == "yarn":
        return _yarn(rope, base_P, head_dim)
    if rope.kind == "longrope":
        return base_P / torch.tensor(rope.pair_factors, dtype=torch.float32)
    return base_P


def _llama3(rope: RopeConfig, base_P: Tensor) -> Tensor:
    # Long wavelengths are stretched by the factor, short ones kept, those between are blended.
    wavelength_P = 2 * math.pi / base_P
    blend_P = (rope.original_context / wavelength_P - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return torch.lerp(base_P / rope.factor, base_P, blend_P.clamp(0, 1))


def _yarn(rope: RopeConfig, base_P: Tensor, head_dim: int) -> Tensor:
    def pair_with_rotations(rotations: float) -> float:
        return head_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index_P = torch.arange(head_dim // 2, dtype=torch.float32)
    # Bounds in the wrong order (a tiny original context) are left as they are, as in transformers.
    stretch_P = ((index_P - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return torch.lerp(base_P, base_P / rope.factor, stretch_P)


def rotate(x_BRHD: Tensor, cos_BRP: Tensor, sin_BRP: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of every head, the half-split layout of Llama checkpoints."""
    cos, sin = cos_BRP.unsqueeze(2), sin_BRP.unsqueeze(2)
    first, second = x_BRHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
