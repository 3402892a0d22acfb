"""Decode attention of one row over the first places of a dense store, cut into splits, and the row itself.

For every method whose past lies densely in device memory: a ring, a table of kept tokens, a copy of a whole layer. Its
reference is ``dualdecoder.attention.step_attention``. Two launches: ``attend_splits`` streams keys and values once, one
program a head and split (flash-decoding); ``merge_splits`` joins the splits with the row's own key and value and, where
the method keeps a ring, writes those into it. Which split sees which place depends on the shapes and the number of
filled places only. The row's own token is not read in the first launch.
Bytes: B K filled (K and V) places, 512 each at D 128 in 16 bits.
Suffixes: B sequences, R = 1 row, H query heads, K KV heads, G = H / K (M: padded for the products), D head size,
P places, Z splits, S splits that are merged at once, T places of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.errors import require
from dualdecoder.kernels.online_softmax import LOG2_E
from dualdecoder.ledger import Ledger

# What tl.dot takes at least; the group may not exceed it.
PADDED_GROUP = 16
# About four programs for each of 132 multiprocessors.
WANTED_PROGRAMS = 512
MAX_SPLITS = 64
SHORTEST_SPLIT = 64
# Partial rows that the merge holds in registers at a time.
MERGED_ROWS = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class RingWorkspace:
    """Partial results of the splits. Serves all layers, but not two launches that may run at the same time.

    logits_BHP: scaled logits in base 2 of the places, fp32, if asked for; only filled places are written.
    """

    partial_BKZGD: Tensor
    peak_BKZG: Tensor
    total_BKZG: Tensor
    logits_BHP: Tensor | None

    @classmethod
    def allocate(
        cls, ledger: Ledger, batch: int, query_heads: int, kv_heads: int, head_dim: int, places: int,
        keep_logits: bool = False, splits: int = 0,
    ) -> RingWorkspace:  # fmt: skip
        """For up to ``places`` places, booked under ``workspace``; ``splits`` 0: chosen from the shapes."""
        splits = splits or wanted_splits(batch * kv_heads, places)
        lead = (batch, kv_heads, splits, query_heads // kv_heads)
        shapes = ((*lead, head_dim), lead, lead)
        partial, peak, total = (ledger.on_device("workspace", shape, torch.float32) for shape in shapes)
        logits = ledger.on_device("workspace", (batch, query_heads, places), torch.float32) if keep_logits else None
        return cls(partial, peak, total, logits)


def wanted_splits(heads: int, places: int) -> int:
    """Splits a head: enough programs to fill the GPU, ``SHORTEST_SPLIT`` places each or more."""
    return max(1, min(WANTED_PROGRAMS // heads, MAX_SPLITS, triton.cdiv(places, SHORTEST_SPLIT)))


@triton.jit
def _split_kernel(
    q_ptr, k_ptr, v_ptr, filled_ptr, partial_ptr, peak_ptr, total_ptr, logits_ptr, scale, places,
    q_stride_b, q_stride_h, k_stride_b, k_stride_k, k_stride_p, v_stride_b, v_stride_k, v_stride_p,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    KEEPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, kv_head = head // K, head % K
    m, d, t = tl.arange(0, M), tl.arange(0, D), tl.arange(0, T)
    q_M = b * q_stride_b + (kv_head * G + m) * q_stride_h
    q_MD = tl.load(q_ptr + q_M[:, None] + d[None, :], mask=(m < G)[:, None], other=0.0)
    if INTERPRETED:
        # The interpreter multiplies the bit patterns of bf16.
        q_MD = q_MD.to(tl.float32)
    k_ptr += b * k_stride_b + kv_head * k_stride_k
    v_ptr += b * v_stride_b + kv_head * v_stride_k
    filled = tl.load(filled_ptr + b).to(tl.int32)
    tiles = tl.cdiv(filled, T)
    peak_M = tl.full((M,), float("-inf"), tl.float32)
    total_M, o_MD = tl.zeros((M,), tl.float32), tl.zeros((M, D), tl.float32)
    for tile in range(split * tiles // Z, (split + 1) * tiles // Z):
        place_T = tile * T + t
        filled_T = place_T < filled
        at_T = place_T.to(tl.int64)
        k_TD = tl.load(k_ptr + (at_T * k_stride_p)[:, None] + d[None, :], mask=filled_T[:, None], other=0.0)
        v_TD = tl.load(v_ptr + (at_T * v_stride_p)[:, None] + d[None, :], mask=filled_T[:, None], other=0.0)
        if INTERPRETED:
            k_TD, v_TD = k_TD.to(tl.float32), v_TD.to(tl.float32)
        logit_MT = tl.dot(q_MD, tl.trans(k_TD), input_precision="ieee") * scale
        if KEEPS:
            at_MT = logits_ptr + (head * G + m)[:, None] * places + place_T[None, :]
            tl.store(at_MT, logit_MT, mask=(m < G)[:, None] & filled_T[None, :])
        logit_MT = tl.where(filled_T[None, :], logit_MT, float("-inf"))
        # Every tile has a filled place, so the new peak is finite.
        higher_M = tl.maximum(peak_M, tl.max(logit_MT, axis=1))
        weight_MT, shrink_M = tl.exp2(logit_MT - higher_M[:, None]), tl.exp2(peak_M - higher_M)
        o_MD = tl.dot(weight_MT.to(v_TD.dtype), v_TD, o_MD * shrink_M[:, None], input_precision="ieee")
        total_M = total_M * shrink_M + tl.sum(weight_MT, axis=1)
        peak_M = higher_M
    at_M = (head * Z + split) * G + m
    tl.store(partial_ptr + at_M[:, None] * D + d[None, :], o_MD, mask=(m < G)[:, None])
    tl.store(peak_ptr + at_M, peak_M, mask=m < G)
    tl.store(total_ptr + at_M, total_M, mask=m < G)


@triton.jit
def merged(
    q_ptr, k_ptr, v_ptr, partial_ptr, peak_ptr, total_ptr, scale, q_stride_h,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, ZP: tl.constexpr, ZZ: tl.constexpr,
):  # fmt: skip
    """Output ``[GP, D]`` of one KV head, the logsumexps (base 2) and the own token's logits ``[GP]``.

    Pointers are those of the KV head: of its first query, of its own key and value, of its first split.
    """
    g, d, z = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, ZP)
    q_GD = tl.load(q_ptr + g[:, None] * q_stride_h + d[None, :], mask=(g < G)[:, None], other=0.0).to(tl.float32)
    own_G = tl.sum(q_GD * tl.load(k_ptr + d).to(tl.float32)[None, :], axis=1) * scale
    real_ZG, at_ZG = (z < Z)[:, None] & (g < G)[None, :], z[:, None] * G + g[None, :]
    peak_ZG = tl.load(peak_ptr + at_ZG, mask=real_ZG, other=float("-inf"))
    total_ZG = tl.load(total_ptr + at_ZG, mask=real_ZG, other=0.0)
    peak_G = tl.maximum(tl.max(peak_ZG, axis=0), own_G)
    total_G = tl.sum(total_ZG * tl.exp2(peak_ZG - peak_G[None, :]), axis=0) + tl.exp2(own_G - peak_G)
    o_GD = tl.exp2(own_G - peak_G)[:, None] * tl.load(v_ptr + d).to(tl.float32)[None, :]
    for first in range(0, Z, ZZ):
        # Some of the splits: names of their own, for a loop may not change the shape of what it found.
        some = first + tl.arange(0, ZZ)
        mask_SG, some_SG = (some < Z)[:, None] & (g < G)[None, :], some[:, None] * G + g[None, :]
        weight_SG = tl.exp2(tl.load(peak_ptr + some_SG, mask=mask_SG, other=float("-inf")) - peak_G[None, :])
        part_ptr = partial_ptr + some_SG[:, :, None] * D + d[None, None, :]
        part_SGD = tl.load(part_ptr, mask=mask_SG[:, :, None], other=0.0)
        o_GD += tl.sum(part_SGD * weight_SG[:, :, None], axis=0)
    return o_GD / total_G[:, None], peak_G + tl.log2(total_G), own_G


@triton.jit
def append(store_k_ptr, store_v_ptr, k_ptr, v_ptr, committed, D: tl.constexpr):
    """Copy one key and value if ``committed``."""
    if committed:
        d = tl.arange(0, D)
        tl.store(store_k_ptr + d, tl.load(k_ptr + d))
        tl.store(store_v_ptr + d, tl.load(v_ptr + d))


@triton.jit
def _merge_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, peak_ptr, total_ptr, o_ptr, store_k_ptr, store_v_ptr, place_ptr, commit_ptr,
    scale, q_stride_b, q_stride_h, k_stride_b, k_stride_k, v_stride_b, v_stride_k,
    store_k_stride_b, store_k_stride_k, store_k_stride_p, store_v_stride_b, store_v_stride_k, store_v_stride_p,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, Z: tl.constexpr, ZP: tl.constexpr,
    ZZ: tl.constexpr, APPENDS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, kv_head = head // K, head % K
    k_ptr += b * k_stride_b + kv_head * k_stride_k
    v_ptr += b * v_stride_b + kv_head * v_stride_k
    o_GD, _, _ = merged(
        q_ptr + b * q_stride_b + kv_head * G * q_stride_h, k_ptr, v_ptr, partial_ptr + head * (Z * G * D),
        peak_ptr + head * (Z * G), total_ptr + head * (Z * G), scale, q_stride_h, G, GP, D, Z, ZP, ZZ,
    )  # fmt: skip
    g, d = tl.arange(0, GP), tl.arange(0, D)
    o_GD = o_GD.to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (head * G + g)[:, None] * D + d[None, :], o_GD, mask=(g < G)[:, None])
    if APPENDS:
        place = tl.load(place_ptr + b)
        k_at = b * store_k_stride_b + kv_head * store_k_stride_k + place * store_k_stride_p
        v_at = b * store_v_stride_b + kv_head * store_v_stride_k + place * store_v_stride_p
        append(store_k_ptr + k_at, store_v_ptr + v_at, k_ptr, v_ptr, tl.load(commit_ptr + b), D)


class RingAttention:
    """Both launches for one method, with their workspace and output, which every call overwrites."""

    def __init__(self, model: ModelConfig, batch: int, places: int, dtype: torch.dtype, ledger: Ledger) -> None:
        heads, head_dim = model.query_heads, model.head_dim
        self.workspace = RingWorkspace.allocate(ledger, batch, heads, model.kv_heads, head_dim, places)
        self.o_BRHD = ledger.on_device("workspace", (batch, 1, heads, head_dim), dtype)

    def __call__(
        self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, store_k_BKPD: Tensor, store_v_BKPD: Tensor,
        filled_B: Tensor, to: Append | None = None,
    ) -> Tensor:  # fmt: skip
        """As ``attend_splits`` and ``merge_splits``."""
        attend_splits(q_BRHD, store_k_BKPD, store_v_BKPD, filled_B, self.workspace)
        return merge_splits(q_BRHD, k_BRKD, v_BRKD, store_k_BKPD, store_v_BKPD, self.workspace, self.o_BRHD, to)


@dataclass(frozen=True)
class Append:
    """Where row 0's key and value go: place ``place_B`` (int64), in the sequences where ``commit_B`` (bool) holds."""

    place_B: Tensor
    commit_B: Tensor


def attend_splits(
    q_BRHD: Tensor, store_k_BKPD: Tensor, store_v_BKPD: Tensor, filled_B: Tensor, workspace: RingWorkspace
) -> None:
    """Attention of the row over places ``0 .. filled_B - 1`` (int64), split by split, into the workspace.

    One dtype: bf16, fp16 or fp32. Any strides with the last dimension contiguous. Other places are not read.
    Raises ``ConfigError`` for shapes without a kernel.
    """
    _check(q_BRHD, store_k_BKPD, store_v_BKPD)
    batch, _, heads, head_dim = q_BRHD.shape
    kv_heads, places, logits = store_k_BKPD.shape[1], store_k_BKPD.shape[2], workspace.logits_BHP
    wide = q_BRHD.dtype == torch.float32
    _split_kernel[(batch * kv_heads, workspace.peak_BKZG.shape[2])](
        q_BRHD, store_k_BKPD, store_v_BKPD, filled_B, workspace.partial_BKZGD, workspace.peak_BKZG,
        workspace.total_BKZG, workspace.peak_BKZG if logits is None else logits, head_dim**-0.5 * LOG2_E, places,
        q_BRHD.stride(0), q_BRHD.stride(2), *store_k_BKPD.stride()[:3], *store_v_BKPD.stride()[:3],
        K=kv_heads, G=heads // kv_heads, D=head_dim, Z=workspace.peak_BKZG.shape[2], M=PADDED_GROUP,
        T=32 if wide else 64, KEEPS=logits is not None, INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=8 if wide else 4, num_stages=3,
    )  # fmt: skip


def merge_splits(
    q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, store_k_BKPD: Tensor, store_v_BKPD: Tensor,
    workspace: RingWorkspace, o_BRHD: Tensor, to: Append | None = None,
) -> Tensor:  # fmt: skip
    """Join what ``attend_splits`` left with the row's own key and value; fills and returns ``o_BRHD`` (contiguous).

    Then write the row's key and value into the store, if ``to`` says where.
    """
    batch, _, _, head_dim = q_BRHD.shape
    tables = (to.place_B, to.commit_B) if to else (o_BRHD, o_BRHD)
    _merge_kernel[(batch * k_BRKD.shape[2],)](
        q_BRHD, k_BRKD, v_BRKD, workspace.partial_BKZGD, workspace.peak_BKZG, workspace.total_BKZG, o_BRHD,
        store_k_BKPD, store_v_BKPD, *tables, head_dim**-0.5 * LOG2_E, *own_strides(q_BRHD, k_BRKD, v_BRKD),
        *store_k_BKPD.stride()[:3], *store_v_BKPD.stride()[:3], **merge_sizes(workspace), APPENDS=to is not None,
        num_warps=4,
    )  # fmt: skip
    return o_BRHD


def own_strides(q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> tuple[int, ...]:
    """Strides of sequence and head of the row's tensors."""
    return tuple(t.stride(i) for t in (q_BRHD, k_BRKD, v_BRKD) for i in (0, 2))


def merge_sizes(workspace: RingWorkspace) -> dict[str, int]:
    """The compile-time sizes of a merge."""
    _, kv_heads, splits, group, head_dim = workspace.partial_BKZGD.shape
    padded, powers = triton.next_power_of_2(group), triton.next_power_of_2(splits)
    at_once = min(powers, MERGED_ROWS // padded)
    return {"K": kv_heads, "G": group, "GP": padded, "D": head_dim, "Z": splits, "ZP": powers, "ZZ": at_once}


def _check(q_BRHD: Tensor, store_k_BKPD: Tensor, store_v_BKPD: Tensor) -> None:
    rows, heads, head_dim = q_BRHD.shape[1:]
    require(rows == 1, "rows", rows, "1")
    group = heads // store_k_BKPD.shape[1]
    require(group <= PADDED_GROUP, "query heads of a KV head", group, f"at most {PADDED_GROUP}")
    require(head_dim >= 16 and head_dim & (head_dim - 1) == 0, "head_dim", head_dim, "a power of two from 16 on")
    require(q_BRHD.dtype in DTYPES, "dtype", q_BRHD.dtype, ", ".join(map(str, DTYPES)))
    last_dense = all(t.stride(-1) == 1 for t in (q_BRHD, store_k_BKPD, store_v_BKPD))
    require(last_dense, "strides", "strided", "tensors contiguous in the last dimension")
