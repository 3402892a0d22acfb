"""Products with packed keys and values in which dequantisation is folded into the other factor.

In 16 bits a code is used where it lies: with all other bits masked off, a byte of codes at the low end of the fraction
(its top bit is the lowest of the exponent) holds the float ``code 2^place / unit``, most often a subnormal one. One
logical operation makes two numbers, and there is no rounding. A number is ``zero + scale code``: keys of a group share
both per channel, so ``q scale`` goes into the product, and ``sum(q zero)``, another product, is added to all tokens.
Values have them per token: the same with the weights. As the numbers are tiny, the other factors take a ``gain``.
In 32 bits a code is converted.

A layout for a warp of its own: what a thread loads is what it hands to the matrix unit, and no number moves. For that
the unit must not see the numbers in their order, but so that a thread has ``RUN`` consecutive ones; a sum does not care.
Tiles are loaded in parts of at most 32 neighbours, so that eight rows of four threads read 16 bytes each.
Suffixes: M query rows, T tokens of a tile, D head size, E channels of a group, X rows of a loaded tile, V words of
32 bits (two numbers each) and I numbers of such a row, A = 8 and J = T / 8: token t of a tile is J a + j, in row 8 j + a.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# Numbers of a row of a loaded tile.
PART = tl.constexpr(32)
# What a thread has of a row, and how many consecutive ones of them the matrix unit takes at a time: of numbers that were
# words, and of others.
THREAD = tl.constexpr(8)
WORD_RUN, RUN = tl.constexpr(4), tl.constexpr(2)


class NumberFormat(NamedTuple):
    """How a byte of codes becomes floats.

    lift: bit of the fraction where the byte begins. gain: what the other factor is multiplied with. back: what a
    product of the code in place 0 must be multiplied with.
    """

    lift: int
    gain: float
    back: float

    @classmethod
    def of(cls, factor: tl.dtype) -> NumberFormat:
        """For a type of 16 bits; in fp32 the code is the number."""
        if factor == tl.float32:
            return cls(0, 1.0, 1.0)
        # The gain leaves room above for products of large factors, and below for small weights.
        fraction, lowest, gain = {"bf16": (7, -133, 100), "fp16": (10, -24, 4)}[str(factor)]
        lift = fraction - 7
        return cls(lift, 2.0**gain, 2.0 ** (-lowest - lift - gain))


@triton.jit
def rotate(word, right):
    """Words rotated by 0 to 31 bits: one instruction."""
    bits = word.to(tl.uint32, bitcast=True)
    return ((bits >> right) | (bits << (-right & 31))).to(tl.int32, bitcast=True)


@triton.jit
def _numbers(word_XV, mask, FACTOR: tl.constexpr):
    """Floats of the codes under the mask, ``[X, V, 2]``."""
    if tl.float32 == FACTOR:
        even_XV = (word_XV & mask & 0xFFFF).to(tl.float32)
        odd_XV = ((word_XV & mask) >> 16).to(tl.float32)
    else:
        both_XV = word_XV & mask
        even_XV, odd_XV = both_XV.to(tl.int16), (both_XV >> 16).to(tl.int16)
    return tl.join(even_XV, odd_XV).to(FACTOR, bitcast=True)


@triton.jit
def unit_order(x, ROWS: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr):
    """``[ROWS, N]`` of a loaded tile, the long side in the matrix unit's order; parts of a row lie ``ROWS`` apart."""
    WIDTH: tl.constexpr = N if N < PART else PART
    x = tl.reshape(x, (N // WIDTH, ROWS, WIDTH // THREAD, THREAD // RUN, RUN))
    return tl.reshape(tl.permute(x, (1, 0, 3, 2, 4)), (ROWS, N))


@triton.jit
def of_tokens(x_A4J, T: tl.constexpr, M: tl.constexpr):
    """``[T, M / 2, 1]``: what tokens have, for a tile of scores, of which each thread has loaded its own."""
    x = tl.reshape(tl.permute(x_A4J, (2, 0, 1)), (T // 8, 8, 1, 4))
    return tl.reshape(tl.broadcast_to(x, (T // 8, 8, M // 8, 4)), (T, M // 2, 1))


@triton.jit
def by_column(x_TH1, T: tl.constexpr, M: tl.constexpr):
    """The same as ``[T, M]``."""
    return tl.reshape(tl.broadcast_to(x_TH1, (T, M // 2, 2)), (T, M))


@triton.jit
def sum_by_thread(x_TM, T: tl.constexpr, M: tl.constexpr):
    """``[8, M]``: a sum over what a thread has of a tile; the rest of the sum can wait."""
    return tl.sum(tl.reshape(x_TM, (T // 8, 8, M)), axis=0)


@triton.jit
def zero_scores(
    wide_q_XI, zeros_ptr, group, low, N: tl.constexpr, W: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Products of the queries with the zeros of N groups of keys, 8 or 16, from ``group`` on; 16 rows."""
    WIDTH: tl.constexpr = D if D < PART else PART
    x, i = tl.arange(0, D // WIDTH * N)[:, None], tl.arange(0, WIDTH)[None, :]
    group_X1 = group + x % N
    zero_XI = tl.load(zeros_ptr + group_X1 * (2 * D) + x // N * WIDTH + i, mask=group_X1 * W < low, other=0.0)
    zero_ND = tl.reshape(unit_order(zero_XI.to(FACTOR), N, D, RUN), (1, N, D))
    zero_ND = tl.reshape(tl.broadcast_to(zero_ND, (16 // N, N, D)), (16, D))
    return tl.dot(zero_ND, tl.trans(unit_order(wide_q_XI, M, D, RUN)), input_precision="ieee")


@triton.jit
def low_scores(
    wide_q_XI, scale_XI, word_XV, mask, T: tl.constexpr, D: tl.constexpr, M: tl.constexpr, FACTOR: tl.constexpr
):
    """Products of the codes of a tile of keys with the queries."""
    factor_DM = tl.trans(unit_order(wide_q_XI * scale_XI.to(FACTOR), M, D, WORD_RUN))
    number_TD = unit_order(_numbers(word_XV, mask, FACTOR), T, D, WORD_RUN)
    return tl.dot(number_TD, factor_DM, input_precision="ieee")


@triton.jit
def add_low_values(
    o_EM, rest_AM, weight_TM, shrink_M, word_EV, scale_A4J, zero_A4J, exists_A4J, mask, gain, T: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Weighted sum of a tile's values, one group of channels.

    The sum over ``rest_AM`` belongs to every channel.
    """
    scale_TM = by_column(of_tokens(tl.where(exists_A4J, scale_A4J.to(tl.float32), 0.0), T, M), T, M)
    zero_TM = by_column(of_tokens(tl.where(exists_A4J, zero_A4J.to(tl.float32), 0.0), T, M), T, M)
    rest_AM = rest_AM * shrink_M[None, :] + sum_by_thread(weight_TM * zero_TM, T, M)
    factor_TM = (weight_TM * (scale_TM * gain)).to(FACTOR)
    # From rows to tokens.
    factor_MT = tl.reshape(tl.permute(tl.reshape(factor_TM, (T // 8, 8, M)), (2, 1, 0)), (M, T))
    factor_TM = tl.trans(unit_order(factor_MT, M, T, WORD_RUN))
    number_ET = unit_order(_numbers(word_EV, mask, FACTOR), E, T, WORD_RUN)
    return tl.dot(number_ET, factor_TM, o_EM * shrink_M[None, :], input_precision="ieee"), rest_AM
