"""Exact top-S of every row of logits, ascending by chunk number: the second half of a selection (scores.py).

Replaces ``landmarks.top_chunks`` and the last step of ``chunk_scores``. A program loads the logits of a row, head by
head of the group, joins the spans' logsumexps while they arrive, and keeps the keys
``max_g(logit_g - logsumexp_g)`` in registers: no key is written. It then looks for a cut that leaves S keys.

The search. A pass counts the keys above one threshold: 175 instructions for the 64 keys of a thread, about 130 on
scalars, then a reduction over the block of some 250 cycles of latency (warp, shared memory, barrier): with 8 warps
about 850 cycles. Three thresholds a pass would count for 1050 and gain two bits, one gains more where it lies well: the
logarithm of the count is nearly linear in the key, so false position with the Illinois rule (halve the weight of an
end that stays twice) takes 7 to 8 passes for normal and heavy-tailed keys (simulated), bisection 12. From pass 20 on it
bisects the integers that sort like the floats, so that ties end too, after at most 32 more; the result is exact.
Writing. A thread loads vectors of 4 chunks, so words of 4 chunks' bits cost no exchange; one prefix sum over the words
numbers them, and 4 steps write. (Numbering chunk by chunk spills, and moves 64-bit addresses between threads.) Ties at
the cut go to the smallest chunk numbers.

A row of up to 32768 chunks is one program, one launch; two of 16384 share a multiprocessor. Longer rows are cut into
segments: launch 1 keeps each segment's own top S, launch 2 selects among these, reading their logits again.
Bytes at B 24, R 2, K 8, G 4, N 16384: 101 MB of logits, fp32, less what L2 still holds (rows run backwards).
Suffixes: B sequences, R rows, K KV heads, G query heads a KV head, N chunks, S selected chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.kernels.scores import LOWEST, ScoreWorkspace, row_length
from dualdecoder.ledger import Ledger

MAX_COUNT = 1024
# Keys that the registers of one program hold at most.
MAX_SEGMENT = 32768
# Few warps, since each repeats the search's arithmetic on scalars. Two programs of 8 warps share a multiprocessor; with
# a multiprocessor for each, twice the registers keep more loads in flight.
KEYS_A_THREAD = 64
FEWEST_WARPS = 4
MULTIPROCESSORS = 132
REGISTERS, REGISTERS_ALONE = 128, 255
# Chunks that a thread loads as one vector.
WORD = tl.constexpr(4)
SHORTEST_SEGMENT = 16
# False position up to this pass, bisection from it on.
BISECT_FROM = tl.constexpr(20)
HIGHEST = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class TopWorkspace:
    """Candidates of the segments (empty if rows are not cut). Serves all layers, but not two launches at a time.

    shared: another kernel has the multiprocessors at the same time, so none can be had alone.
    """

    candidates: Tensor
    segment: int
    shared: bool = False

    @classmethod
    def allocate(
        cls, ledger: Ledger, rows: int, chunks: int, count: int, segment: int = 0, shared: bool = False
    ) -> TopWorkspace:
        """For launches of at most these sizes (``rows`` = B R K), booked under ``workspace``.

        ``segment``: chunks of one program, 0 for the most.
        """
        segment = segment or MAX_SEGMENT
        power = triton.next_power_of_2(segment) == segment
        ok = power and SHORTEST_SEGMENT <= segment <= MAX_SEGMENT
        require(ok, "segment", segment, f"a power of two, {SHORTEST_SEGMENT} to {MAX_SEGMENT}")
        segments = triton.cdiv(chunks, segment)
        size = rows * segments * count if segments > 1 else 0
        return cls(ledger.on_device("workspace", (size,), torch.int32), segment, shared)


@triton.jit
def _image(key):
    """Integers in the order of the floats; -0 like 0."""
    bits = tl.where(key == 0.0, 0.0, key).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & HIGHEST)


@triton.jit
def _key(image):
    return (image ^ ((image >> 31) & HIGHEST)).to(tl.float32, bitcast=True)


@triton.jit
def _keys(logits_ptr, logsumexps_ptr, n_N, mask_N, length, spans, G: tl.constexpr, SPANS: tl.constexpr):
    """``max_g(logit_g - logsumexp_g)``; one head's logits are in flight while its logsumexps are joined."""
    s = tl.arange(0, SPANS)
    key_N = tl.full(n_N.shape, float("-inf"), tl.float32)
    for g in tl.range(G):
        logit_N = tl.load(logits_ptr + g * length + n_N, mask=mask_N, other=float("-inf"))
        part_S = tl.load(logsumexps_ptr + g * spans + s, mask=s < spans, other=LOWEST)
        peak = tl.max(part_S, axis=0)
        logsumexp = peak + tl.log(tl.sum(tl.exp(part_S - peak), axis=0))
        key_N = tl.maximum(key_N, logit_N - logsumexp)
    return key_N


@triton.jit
def _cut(key_N, count: tl.constexpr):
    """``(low, high, wanted, above)``: ``above`` < ``wanted`` keys are at least ``high``, and the missing
    ``wanted - above`` are found, by chunk number, among the keys of ``[low, high)``."""
    candidate_N = key_N > float("-inf")
    at_least_low = tl.sum(candidate_N.to(tl.int32), axis=0)
    wanted = tl.minimum(at_least_low, count)
    low = _image(tl.min(tl.where(candidate_N, key_N, float("inf")), axis=0))
    high = _image(tl.max(key_N, axis=0)) + 1
    above = wanted * 0
    passes, last_side = 0, 0
    # Logarithms of the counts and weights of both ends: a pass takes one logarithm and one division.
    target = tl.log2(wanted.to(tl.float32))
    low_log, high_log = tl.log2(at_least_low.to(tl.float32)), -1.0
    low_weight, high_weight = 1.0, 1.0
    while (high - 1 > low) & (at_least_low != wanted):
        excess, lack = (low_log - target) * low_weight, (target - high_log) * high_weight
        guess = _key(low) + (_key(high) - _key(low)) * (excess / (excess + lack))
        middle = tl.minimum(tl.maximum(_image(guess), low + 1), high - 1)
        # The mean, without overflow.
        middle = tl.where(passes < BISECT_FROM, middle, (low & high) + ((low ^ high) >> 1))
        at_least_middle = tl.sum((key_N >= _key(middle)).to(tl.int32), axis=0)
        middle_log = tl.log2(tl.maximum(at_least_middle.to(tl.float32), 0.5))
        enough = at_least_middle >= wanted
        side = tl.where(enough, 1, -1)
        # The end that has now stayed twice loses half its weight, so that the next guess crosses the cut.
        halve = tl.where(side == last_side, 0.5, 1.0)
        low_weight = tl.where(enough, 1.0, low_weight * halve)
        high_weight = tl.where(enough, high_weight * halve, 1.0)
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        low_log, high_log = tl.where(enough, middle_log, low_log), tl.where(enough, high_log, middle_log)
        at_least_low = tl.where(enough, at_least_middle, at_least_low)
        above = tl.where(enough, above, at_least_middle)
        last_side = side
        passes += 1
    return _key(low), _key(high), wanted, above


@triton.jit
def _write(key_N, low, high, missing, numbers_ptr, out_ptr, begin, SEGMENT: tl.constexpr):
    """Write the chunks above the cut and the first ``missing`` at it in ascending order."""
    i_N, w = tl.arange(0, SEGMENT), tl.arange(0, SEGMENT // WORD)
    # Counts of two kinds in one integer: at most 1024 above the cut in the upper half, 32768 at it in the lower.
    ones_N = tl.where(key_N >= high, 65536, tl.where(key_N >= low, 1, 0))
    total_W = tl.sum(tl.reshape(ones_N, (SEGMENT // WORD, WORD)), axis=1)
    bits_W = tl.sum(tl.reshape(ones_N << (i_N % WORD), (SEGMENT // WORD, WORD)), axis=1)
    before_W = tl.cumsum(total_W, axis=0) - total_W
    ties_W = before_W & 65535
    place_W = (before_W >> 16) + tl.minimum(ties_W, missing)
    # Not unrolled: that spills.
    for bit in tl.range(WORD, loop_unroll_factor=1):
        tie_W, sure_W = (bits_W >> bit) & 1, (bits_W >> (bit + 16)) & 1
        selected_W = (sure_W == 1) | ((tie_W == 1) & (ties_W < missing))
        number_W = w * WORD + bit
        if numbers_ptr is not None:
            number_W = tl.load(numbers_ptr + number_W, mask=selected_W, other=0)
        tl.store(out_ptr + place_W, (begin + number_W).to(out_ptr.dtype.element_ty), mask=selected_W)
        place_W += selected_W.to(tl.int32)
        ties_W += tie_W


@triton.jit
def _select_kernel(
    logits_ptr, logsumexps_ptr, chunks_ptr, candidates_ptr, out_ptr, length, spans, candidates,
    K: tl.constexpr, G: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, SPANS: tl.constexpr,
    SEGMENT: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """``candidates_ptr`` None: from all chunks. ``FINAL``: to ``[B, R, K, S]``, else to candidates ``[B, K, R, *]``."""
    segment = tl.program_id(0)
    # Backwards: the logits written last are still in L2.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    b, kv_head, r = row // (K * R), row // R % K, row % R
    begin = segment * SEGMENT
    if candidates_ptr is None:
        numbers_ptr = None
        n_N = begin + tl.arange(0, SEGMENT)
        mask_N = n_N < length
    else:
        # One program a row: begin is 0.
        numbers_ptr = candidates_ptr + row * candidates
        i_N = tl.arange(0, SEGMENT)
        n_N = tl.load(numbers_ptr + i_N, mask=i_N < candidates, other=-1)
        mask_N = n_N >= 0
    logits_ptr += row * G * length
    key_N = _keys(logits_ptr, logsumexps_ptr + row * G * spans, n_N, mask_N, length, spans, G, SPANS)
    # Logits of chunks that do not exist are garbage; masking their loads would cost the vectors of four.
    exists_N = mask_N & (n_N < tl.load(chunks_ptr + b).to(tl.int32))
    key_N = tl.where(exists_N, key_N, float("-inf"))
    low, high, wanted, above = _cut(key_N, S)
    if FINAL:
        out_ptr += ((b * R + r) * K + kv_head) * S
    else:
        out_ptr += (row * tl.num_programs(0) + segment) * S
    _write(key_N, low, high, wanted - above, numbers_ptr, out_ptr, begin, SEGMENT)
    s = tl.arange(0, SP)
    tl.store(out_ptr + s, -1, mask=(s >= wanted) & (s < S))


def select_top(
    scores: ScoreWorkspace, chunks_B: Tensor, group: int, chunks: int, out_BRKS: Tensor, workspace: TopWorkspace
) -> None:
    """Write the S best chunks of every row to ``out_BRKS`` (int64), ascending, -1 behind them.

    ``scores``: as ``score_chunks`` left it for these B, R, K, ``group`` heads a KV head and ``chunks`` chunks of
    landmarks. chunks_B (int64): chunks that exist. Ties go to the smaller chunk number; excluded chunks (-inf) are
    never selected. Raises ``ConfigError`` for shapes, S above 1024, a workspace that is too small, and rows whose
    candidates one program cannot hold (segments * S above 32768).
    """
    _check(scores, group, chunks, out_BRKS, workspace)
    segments, S = triton.cdiv(chunks, workspace.segment), out_BRKS.shape[-1]
    if segments == 1:
        _launch(scores, chunks_B, group, chunks, None, out_BRKS, out_BRKS.shape, 1, chunks, workspace.shared)
        return
    candidates = workspace.candidates
    shape, shared = out_BRKS.shape, workspace.shared
    _launch(scores, chunks_B, group, chunks, None, candidates, shape, segments, workspace.segment, shared)
    _launch(scores, chunks_B, group, chunks, candidates, out_BRKS, shape, 1, segments * S, shared)


def _launch(
    scores: ScoreWorkspace,
    chunks_B: Tensor,
    group: int,
    chunks: int,
    candidates: Tensor | None,
    out: Tensor,
    shape: tuple[int, ...],
    segments: int,
    length: int,
    shared: bool,
) -> None:
    """``length``: chunks or candidates of one program. ``shape``: B, R, K, S."""
    B, R, K, S = shape
    segment = max(SHORTEST_SEGMENT, triton.next_power_of_2(length))
    warps = max(FEWEST_WARPS, segment // (32 * KEYS_A_THREAD))
    alone = not shared and B * K * R * segments <= MULTIPROCESSORS and warps <= 8
    spans = triton.cdiv(chunks, scores.span)
    _select_kernel[(segments, B * K * R)](
        scores.logits, scores.logsumexps, chunks_B, candidates, out, row_length(chunks), spans, length,
        K, group, R, S, triton.next_power_of_2(S), triton.next_power_of_2(spans), segment, segments == 1,
        num_warps=warps, maxnreg=REGISTERS_ALONE if alone else REGISTERS,
    )  # fmt: skip


def _check(scores: ScoreWorkspace, group: int, chunks: int, out_BRKS: Tensor, workspace: TopWorkspace) -> None:
    rows, S = out_BRKS.shape[:3].numel(), out_BRKS.shape[-1]
    require(1 <= S <= MAX_COUNT, "count", S, f"1 to {MAX_COUNT}")
    fits = out_BRKS.is_contiguous() and out_BRKS.dtype == torch.int64
    require(fits, "out", f"{out_BRKS.dtype}, strides {out_BRKS.stride()}", "a contiguous int64 tensor")
    logits = rows * group * row_length(chunks)
    require(scores.logits.numel() >= logits, "scores", scores.logits.numel(), f"at least {logits} logits")
    segments = triton.cdiv(chunks, workspace.segment)
    candidates = segments * S if segments > 1 else 0
    require(candidates <= MAX_SEGMENT, "chunks", chunks, f"segments * count of at most {MAX_SEGMENT}")
    needed, there = rows * candidates, workspace.candidates.numel()
    require(there >= needed, "workspace", there, f"at least {needed} candidates")
