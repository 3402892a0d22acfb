"""Rotary position embedding: default, linear, Llama-3.1 and YaRN frequency scaling.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); the Llama 3.1 model card's frequency rule.
Suffixes: B sequences, R rows, H heads, D head size, P = D / 2 frequency pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualdecoder.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, fp32 ``[D/2]``, and the factor by which cos and sin are scaled."""
    exponent_P = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base_P = 1.0 / rope.theta**exponent_P
    if rope.kind == "linear":
        return base_P / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base_P), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base_P, head_dim), _yarn_scale(rope)
    return base_P, 1.0


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

    low = max(math.floor(pair_with_rotations(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(rope.beta_slow)), head_dim - 1)
    index_P = torch.arange(head_dim // 2, dtype=torch.float32)
    stretch_P = ((index_P - low) / max(high - low, 0.001)).clamp(0, 1)
    return torch.lerp(base_P, base_P / rope.factor, stretch_P)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rotate(x_BRHD: Tensor, cos_BRP: Tensor, sin_BRP: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + D/2)`` of every head, the half-split layout of Llama checkpoints."""
    cos, sin = cos_BRP.unsqueeze(2), sin_BRP.unsqueeze(2)
    first, second = x_BRHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
