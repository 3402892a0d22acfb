"""The small operations between the matrix products of a decode step, each one launch.

At one or two rows a sequence these move a few kilobytes; what they cost is launches. Arithmetic is fp32 and rounds
once, where the PyTorch form (``model.Decoder``, ``rope.rotate``) rounds after every operation.
Suffixes: B sequences, R rows, N = B R flattened rows, H query heads, K KV heads, D head size, P = D / 2 pairs,
E model width, F MLP width, Q = (H + 2 K) D fused projections.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require

ROTATED_HEADS = 8
SWIGLU_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, y_ptr, eps, E: tl.constexpr, EP: tl.constexpr):
    e = tl.arange(0, EP)
    real = e < E
    at = tl.program_id(0).to(tl.int64) * E + e
    x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + e, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / E + eps)
    tl.store(y_ptr + at, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=real)


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float, y_NE: Tensor) -> Tensor:
    """``y = x / rms(x) * weight``; fills and returns ``y_NE``.

    Any leading dimensions; all contiguous and of one dtype. E up to 65,536: a row is one program.
    """
    _require_contiguous(x_NE, weight_E, y_NE)
    width = weight_E.shape[0]
    padded = triton.next_power_of_2(width)
    _rms_norm_kernel[(x_NE.numel() // width,)](
        x_NE, weight_E, y_NE, eps, E=width, EP=padded, num_warps=min(16, max(1, padded // 256)),
    )  # fmt: skip
    return y_NE


@triton.jit
def _normed(first_HP, second_HP, head_H1, p_1P, real_HP, q_norm_ptr, k_norm_ptr, eps, H: tl.constexpr, D: tl.constexpr):
    """Both halves of each head over the head's root mean square, times the query's or the key's weights."""
    squares_H1 = tl.sum(first_HP * first_HP + second_HP * second_HP, axis=1, keep_dims=True)
    scale_H1 = tl.rsqrt(squares_H1 / D + eps)
    norm_HP = tl.where(head_H1 < H, q_norm_ptr, k_norm_ptr) + p_1P
    first_weight_HP = tl.load(norm_HP, mask=real_HP, other=0.0).to(tl.float32)
    second_weight_HP = tl.load(norm_HP + D // 2, mask=real_HP, other=0.0).to(tl.float32)
    # Rounded as the stored keys would be before their rotation.
    first_HP = (first_HP * scale_H1 * first_weight_HP).to(q_norm_ptr.dtype.element_ty)
    second_HP = (second_HP * scale_H1 * second_weight_HP).to(q_norm_ptr.dtype.element_ty)
    return first_HP.to(tl.float32), second_HP.to(tl.float32)


@triton.jit
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PP: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head_H1 = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    p_1P = tl.arange(0, PP)[None, :]
    real_1P = p_1P < D // 2
    real_HP = (head_H1 < H + K) & real_1P
    at_HP = row * ((H + 2 * K) * D) + head_H1 * D + p_1P
    cos_1P = tl.load(cos_ptr + row * (D // 2) + p_1P, mask=real_1P, other=0.0).to(tl.float32)
    sin_1P = tl.load(sin_ptr + row * (D // 2) + p_1P, mask=real_1P, other=0.0).to(tl.float32)
    first_HP = tl.load(qkv_ptr + at_HP, mask=real_HP, other=0.0).to(tl.float32)
    second_HP = tl.load(qkv_ptr + at_HP + D // 2, mask=real_HP, other=0.0).to(tl.float32)
    if NORM:
        first_HP, second_HP = _normed(first_HP, second_HP, head_H1, p_1P, real_HP, q_norm_ptr, k_norm_ptr, eps, H, D)
    kind = qkv_ptr.dtype.element_ty
    tl.store(qkv_ptr + at_HP, (first_HP * cos_1P - second_HP * sin_1P).to(kind), mask=real_HP)
    tl.store(qkv_ptr + at_HP + D // 2, (second_HP * cos_1P + first_HP * sin_1P).to(kind), mask=real_HP)


def rotate_queries_and_keys(
    qkv_BRQ: Tensor,
    rotation: tuple[Tensor, Tensor],
    query_heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """QK norm (if ``norms`` = (q_norm_D, k_norm_D)) and rotation of q and k, in place in the fused output; v stays.

    ``rotation`` holds cosines and sines ``[B, R, D/2]`` of ``Decoder.rotation`` (rope_scale already in them), in any
    float dtype. Pairs are ``(i, i + D/2)``. All tensors contiguous; qkv bf16, fp16 or fp32.
    """
    _require_contiguous(qkv_BRQ, *rotation, *(norms or ()))
    rows, head_dim = qkv_BRQ.numel() // qkv_BRQ.shape[-1], qkv_BRQ.shape[-1] // (query_heads + 2 * kv_heads)
    _rotate_kernel[(rows, triton.cdiv(query_heads + kv_heads, ROTATED_HEADS))](
        qkv_BRQ, *rotation, *(norms or (qkv_BRQ, qkv_BRQ)), eps, H=query_heads, K=kv_heads, D=head_dim,
        PP=triton.next_power_of_2(head_dim // 2), HEADS=ROTATED_HEADS, NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return qkv_BRQ


@triton.jit
def _swiglu_kernel(gate_up_ptr, out_ptr, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * (2 * F) + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * F) + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * F + f, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=f < F)


def swiglu(gate_up_N2F: Tensor, out_NF: Tensor) -> Tensor:
    """``silu(gate) * up`` from the fused projection ``[..., 2F]``; fills and returns ``out_NF``. Contiguous tensors."""
    _require_contiguous(gate_up_N2F, out_NF)
    width = out_NF.shape[-1]
    grid = (out_NF.numel() // width, triton.cdiv(width, SWIGLU_BLOCK))
    _swiglu_kernel[grid](gate_up_N2F, out_NF, F=width, BLOCK=SWIGLU_BLOCK, num_warps=4)
    return out_NF


def _require_contiguous(*tensors: Tensor) -> None:
    require(all(t.is_contiguous() for t in tensors), "strides", "strided", "contiguous tensors")
