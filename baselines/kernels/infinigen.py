"""InfiniGen's operations of one layer in Triton, with the meaning of ``baselines.infinigen_ops``.

Scores take two launches: logits of the partial keys with the largest one of each span, then each token's score in its
group and the number of those above -alpha. A score is kept as an integer that sorts like (score, lower position), so
that ``torch.topk`` is exact to the last tie. The chosen tokens become a fetch list and are read over the link by
``dualdecoder.kernels.gather``; a dense layer is one plain copy. n never leaves the device: everything has the shape of
the cap, and what is beyond n is neither fetched nor read.
Bytes a token and KV head at D 128 in 16 bits, ratio 0.3: partial key 80, logits 4 G written and read, score 8 written
and several times read by topk.
Suffixes: as in ``baselines/infinigen_ops.py``; M = G padded for the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baselines.kernels.ring_attention import PADDED_GROUP, RingAttention
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import ModelConfig
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.kernels.gather import gather_records
from dualdecoder.kernels.slots import replace_all
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.ledger import Ledger

TILE = 128
# Tokens of one program.
SPAN = 1024
# Records are 512 bytes at D 128 in 16 bits: many have to be under way at once.
GATHER_PROGRAMS = 32
GATHER_ROWS = 16
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _logits_kernel(
    query_ptr, partial_ptr, length_ptr, logits_ptr, peaks_ptr, scale, tokens, spans, K: tl.constexpr, G: tl.constexpr,
    J: tl.constexpr, JP: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, j, m = span * SPAN, tl.arange(0, JP), tl.arange(0, M)
    end = tl.minimum(tl.load(length_ptr + head // K).to(tl.int32), begin + SPAN)
    q_ptr = query_ptr + (head * G + m)[None, :] * J + j[:, None]
    q_JM = tl.load(q_ptr, mask=(m < G)[None, :] & (j < J)[:, None], other=0.0)
    if INTERPRETED:
        # The interpreter multiplies the bit patterns of bf16.
        q_JM = q_JM.to(tl.float32)
    peak_M = tl.full((M,), float("-inf"), tl.float32)
    for first in range(begin, end, TILE):
        t = first + tl.arange(0, TILE)
        at_TJ = partial_ptr + (head * tokens + t)[:, None] * J + j[None, :]
        key_TJ = tl.load(at_TJ, mask=(t < end)[:, None] & (j < J)[None, :], other=0.0)
        if INTERPRETED:
            key_TJ = key_TJ.to(tl.float32)
        logit_TM = tl.dot(key_TJ, q_JM, input_precision="ieee") * scale
        at_TM = logits_ptr + (head * G + m)[None, :] * tokens + t[:, None]
        tl.store(at_TM, logit_TM, mask=(t < end)[:, None] & (m < G)[None, :])
        peak_M = tl.maximum(peak_M, tl.max(tl.where((t < end)[:, None], logit_TM, float("-inf")), axis=0))
    tl.store(peaks_ptr + (head * G + m) * spans + span, peak_M, mask=m < G)


@triton.jit
def _scores_kernel(
    logits_ptr, peaks_ptr, length_ptr, ranked_ptr, counts_ptr, alpha, tokens, spans, K: tl.constexpr, G: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """``ranked``: int64, the score's image above, less the position below; ``counts``: tokens above -alpha, a span."""
    span, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, s = span * SPAN + tl.arange(0, SPAN), tl.arange(0, SPANS)
    exists_T = t < tl.load(length_ptr + head // K)
    score_T = tl.full((SPAN,), float("-inf"), tl.float32)
    for g in tl.static_range(G):
        peak = tl.max(tl.load(peaks_ptr + (head * G + g) * spans + s, mask=s < spans, other=float("-inf")), axis=0)
        logit_T = tl.load(logits_ptr + (head * G + g) * tokens + t, mask=exists_T, other=float("-inf"))
        score_T = tl.maximum(score_T, logit_T - peak)
    tl.store(counts_ptr + head * spans + span, tl.sum((exists_T & (score_T > -alpha)).to(tl.int32), axis=0))
    # -0 is 0; integers in the order of the floats.
    bits_T = tl.where(score_T == 0.0, 0.0, score_T).to(tl.int32, bitcast=True)
    image_T = (bits_T ^ ((bits_T >> 31) & HIGHEST)).to(tl.int64)
    tl.store(ranked_ptr + head * tokens + t, image_T * 4294967296 + (HIGHEST - t), mask=t < tokens)


@triton.jit
def _append_kernel(
    k_ptr, v_ptr, host_ptr, skew_ptr, partial_ptr, length_ptr, commit_ptr, tokens, sequences,
    k_stride_b, k_stride_k, v_stride_b, v_stride_k,
    K: tl.constexpr, D: tl.constexpr, J: tl.constexpr, JP: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, kv_head = head // K, head % K
    d, j = tl.arange(0, D), tl.arange(0, JP)
    if tl.load(commit_ptr + b):
        token = tl.load(length_ptr + b)
        key_D = tl.load(k_ptr + b * k_stride_b + kv_head * k_stride_k + d)
        record_ptr = host_ptr + ((b % sequences * K + kv_head) * tokens + token) * (2 * D)
        tl.store(record_ptr + d, key_D)
        tl.store(record_ptr + D + d, tl.load(v_ptr + b * v_stride_b + kv_head * v_stride_k + d))
        if PARTIAL:
            at_DJ = skew_ptr + (head * D + d)[:, None] * J + j[None, :]
            skew_DJ = tl.load(at_DJ, mask=(j < J)[None, :], other=0.0).to(tl.float32)
            columns_J = tl.sum(key_D.to(tl.float32)[:, None] * skew_DJ, axis=0)
            columns_J = columns_J.to(partial_ptr.dtype.element_ty)
            tl.store(partial_ptr + (head * tokens + token) * J + j, columns_J, mask=j < J)


class TritonOps:
    """Kernels and their workspaces for one method instance."""

    def __init__(
        self, model: ModelConfig, alpha: float, batch: int, context: int, slots: int, *, dtype: torch.dtype,
        ledger: Ledger,
    ) -> None:  # fmt: skip
        heads, spans = (batch, model.kv_heads), triton.cdiv(context, SPAN)
        self.alpha = alpha
        self.logits_BHT = ledger.on_device("workspace", (batch, model.query_heads, context), torch.float32)
        self.peaks_BHZ = ledger.on_device("workspace", (batch, model.query_heads, spans), torch.float32)
        self.ranked_BKT = ledger.on_device("workspace", (*heads, context), torch.int64)
        self.counts_BKZ = ledger.on_device("workspace", (*heads, spans), torch.int32)
        self.best = [ledger.on_device("workspace", (*heads, slots), torch.int64) for _ in range(2)]
        self.slot_S = ledger.on_device("workspace", (slots,), torch.int64)
        torch.arange(slots, device=ledger.device, out=self.slot_S)
        self.chosen = FetchList.allocate(ledger, batch * model.kv_heads * slots)
        self.whole_BKTXCD = ledger.on_device("buffers", (*heads, context, 2, 1, model.head_dim), dtype)
        self.sparse_attention = RingAttention(model, batch, slots, dtype, ledger)
        self.dense_attention = RingAttention(model, batch, context, dtype, ledger)

    def choose(
        self, query_BKGJ: Tensor, partial_BKTJ: Tensor, length_B: Tensor, wanted_B: Tensor, buffer: ChunkBuffer
    ) -> None:
        self._rank(query_BKGJ.contiguous(), partial_BKTJ, length_B, buffer.records_BKSXCD.shape[-1] ** -0.5)
        slots, kv_heads = len(self.slot_S), partial_BKTJ.shape[1]
        counted_B = self.counts_BKZ.sum(dim=(1, 2))
        torch.clamp(counted_B // kv_heads, max=slots, out=wanted_B)
        torch.topk(self.ranked_BKT, slots, dim=-1, out=tuple(self.best))
        beyond_B1S = (self.slot_S >= wanted_B[:, None])[:, None]
        self.chosen.count.zero_()
        replace_all(self.best[1].masked_fill(beyond_B1S, NO_CHUNK), buffer.held_BKS, self.chosen)

    def _rank(self, query_BKGJ: Tensor, partial_BKTJ: Tensor, length_B: Tensor, scale: float) -> None:
        (batch, kv_heads, group, columns), tokens = query_BKGJ.shape, partial_BKTJ.shape[2]
        require(group <= PADDED_GROUP, "query heads of a KV head", group, f"at most {PADDED_GROUP}")
        grid, spans = (self.counts_BKZ.shape[2], batch * kv_heads), self.counts_BKZ.shape[2]
        sizes = {"K": kv_heads, "G": group, "SPAN": SPAN}
        _logits_kernel[grid](
            query_BKGJ, partial_BKTJ, length_B, self.logits_BHT, self.peaks_BHZ, scale, tokens, spans, **sizes,
            J=columns, JP=max(16, triton.next_power_of_2(columns)), M=PADDED_GROUP, TILE=TILE,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=4,
        )  # fmt: skip
        _scores_kernel[grid](
            self.logits_BHT, self.peaks_BHZ, length_B, self.ranked_BKT, self.counts_BKZ, float(self.alpha), tokens,
            spans, **sizes, SPANS=triton.next_power_of_2(spans), num_warps=4,
        )  # fmt: skip

    def fetch(self, host: HostStore, layer: int, buffer: ChunkBuffer) -> None:
        records, sizes = host.records[layer], {"programs": GATHER_PROGRAMS, "rows": GATHER_ROWS}
        gather_records(records, buffer.records_BKSXCD, self.chosen, **sizes)

    def load(self, host: HostStore, layer: int) -> None:
        records = host.records[layer]
        for first in range(0, len(self.whole_BKTXCD), len(records)):
            part_BKTXCD = self.whole_BKTXCD[first : first + len(records)]
            part_BKTXCD.copy_(records[: len(part_BKTXCD)], non_blocking=True)

    def attend(self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, buffer: ChunkBuffer, wanted_B: Tensor) -> Tensor:
        return self.sparse_attention(q_BRHD, k_BRKD, v_BRKD, *_keys_and_values(buffer.records_BKSXCD), wanted_B)

    def attend_to_all(self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, length_B: Tensor) -> Tensor:
        return self.dense_attention(q_BRHD, k_BRKD, v_BRKD, *_keys_and_values(self.whole_BKTXCD), length_B)

    def append(
        self, k_BKD: Tensor, v_BKD: Tensor, host: HostStore, layer: int, partial: tuple[Tensor, Tensor] | None,
        length_B: Tensor, commit_B: Tensor,
    ) -> None:  # fmt: skip
        records, (batch, kv_heads, head_dim) = host.records[layer], k_BKD.shape
        skew_BKDJ, partial_BKTJ = partial or (k_BKD, k_BKD)
        columns = skew_BKDJ.shape[-1]
        _append_kernel[(batch * kv_heads,)](
            k_BKD, v_BKD, records, skew_BKDJ, partial_BKTJ, length_B, commit_B, records.shape[2], len(records),
            *k_BKD.stride()[:2], *v_BKD.stride()[:2], K=kv_heads, D=head_dim, J=columns,
            JP=triton.next_power_of_2(columns), PARTIAL=partial is not None, num_warps=4,
        )  # fmt: skip


def _keys_and_values(records_BKPXCD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, K, P, D]`` of one-token records, as views."""
    k_BKPD, v_BKPD = records_BKPXCD.squeeze(4).unbind(3)
    return k_BKPD, v_BKPD
