"""Products with packed keys and values in which dequantisation is folded into the other factor.

In 16 bits a code is used where it lies. The words are turned so that a byte of codes is at the low end of the fraction,
its top bit the lowest of the exponent: with all but one code masked off, that is the float ``code 2^place`` times a
constant, mostly a subnormal one, which matrix units multiply exactly. One logical operation makes two numbers. As they
are tiny, the other factor takes a gain where it needs one. In 32 bits a code is converted.
A number is ``zero + scale code``. Keys of a group share both per channel: ``q scale`` goes into the product, and
``sum(q zero)``, one product for the groups of a block, is added for all its tokens. Values have them per token: the
same with the weights.
Suffixes: as in ``lowbit_tiles.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from baselines.kernels.lowbit_tiles import (
    RUN,
    WORD_RUN,
    by_column,
    load_key_levels,
    of_rows,
    sum_by_thread,
    to_tokens,
    unit_order,
)


class NumberFormat(NamedTuple):
    """How a byte of codes becomes floats.

    lift: bit where the byte begins. key_gain, value_gain: what the other factor is multiplied with. key_back,
    value_back: what a product of codes in place 0 must be multiplied with.
    """

    lift: int
    key_gain: float
    value_gain: float
    key_back: float
    value_back: float

    @classmethod
    def of(cls, factor: tl.dtype) -> NumberFormat:
        """For a type of 16 bits; in fp32 the code is the number."""
        if factor == tl.float32:
            return cls(0, 1.0, 1.0, 1.0, 1.0)
        # bf16 has no room below for products with its smallest numbers; fp16 has little above for large keys, and below
        # for small weights.
        fraction, smallest, *gains = {"bf16": (7, -133, 100, 100), "fp16": (10, -24, 0, 4)}[str(factor)]
        lift = fraction - 7
        backs = (2.0 ** (-smallest - lift - gain) for gain in gains)
        return cls(lift, *(2.0**gain for gain in gains), *backs)


@triton.jit
def turned(word, right):
    """Words rotated by 0 to 31 bits: one instruction."""
    bits = word.to(tl.uint32, bitcast=True)
    return ((bits >> right) | (bits << (-right & 31))).to(tl.int32, bitcast=True)


@triton.jit
def _numbers(word_XV, mask, FACTOR: tl.constexpr):
    """Floats of the codes under the mask, ``[X, V, 2]``."""
    both_XV = word_XV & mask
    if tl.float32 == FACTOR:
        even_XV, odd_XV = (both_XV & 0xFFFF).to(tl.float32), (both_XV >> 16).to(tl.float32)
    else:
        even_XV, odd_XV = both_XV.to(tl.int16), (both_XV >> 16).to(tl.int16)
    return tl.join(even_XV, odd_XV).to(FACTOR, bitcast=True)


@triton.jit
def zero_scores(
    wide_q_XI, zeros_ptr, group, low, N: tl.constexpr, W: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Products of the queries with the zeros of N groups of keys (8 or 16) from ``group`` on, ``[16, M]``."""
    zero_XI = load_key_levels(zeros_ptr, group, low, N, 1, W, D).to(FACTOR)
    zero_ND = tl.reshape(unit_order(zero_XI, N, D, RUN), (1, N, D))
    # The unit takes no fewer than 16 rows.
    zero_ND = tl.reshape(tl.broadcast_to(zero_ND, (16 // N, N, D)), (16, D))
    return tl.dot(zero_ND, tl.trans(unit_order(wide_q_XI, M, D, RUN)), input_precision="ieee")


@triton.jit
def low_scores(
    wide_q_XI, scale_XI, word_XV, mask, T: tl.constexpr, D: tl.constexpr, M: tl.constexpr, FACTOR: tl.constexpr
):
    """Products of the queries with the scaled codes of a tile of keys, ``[T, M]``."""
    factor_DM = tl.trans(unit_order(wide_q_XI * scale_XI.to(FACTOR), M, D, WORD_RUN))
    return tl.dot(unit_order(_numbers(word_XV, mask, FACTOR), T, D, WORD_RUN), factor_DM, input_precision="ieee")


@triton.jit
def add_low_values(
    o_EM, rest_AM, weight_TM, shrink_M, word_EV, scale_A4J, zero_A4J, exists_A4J, mask, gain, T: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Weighted sum of a tile's values, one group of channels. The sum over ``rest_AM`` belongs to every channel."""
    # What does not exist may be anything: a weight of zero does not help.
    scale_TM = by_column(of_rows(tl.where(exists_A4J, scale_A4J.to(tl.float32), 0.0), T, M), T, M)
    zero_TM = by_column(of_rows(tl.where(exists_A4J, zero_A4J.to(tl.float32), 0.0), T, M), T, M)
    rest_AM = rest_AM * shrink_M[None, :] + sum_by_thread(weight_TM * zero_TM, T, M)
    factor_MT = to_tokens((weight_TM * (scale_TM * gain)).to(FACTOR), T, M)
    factor_TM = tl.trans(unit_order(factor_MT, M, T, WORD_RUN))
    number_ET = unit_order(_numbers(word_EV, mask, FACTOR), E, T, WORD_RUN)
    return tl.dot(number_ET, factor_TM, o_EM * shrink_M[None, :], input_precision="ieee"), rest_AM
