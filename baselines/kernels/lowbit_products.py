"""Products with packed keys and values in which dequantisation is folded into the other factor.

In 16 bits a code becomes the float ``n = 1 + code / span`` by putting it into the fraction of a one: a rotation and a
logical operation for two neighbouring channels, no conversion. A number is ``zero + scale code``, so with
``f = span scale`` it is ``f n + (zero - f)``. Keys of a group share f per channel: q f goes into the product, and
``sum(q zero - q f)`` is added to all its tokens. Values have f per token: the same with the weights. Both sums use the
factors as rounded for the product, so the ones cancel exactly. But they are summed before they cancel, and matrix units
truncate: so the code goes into the highest bits, where the span is smallest. In 32 bits a code is converted: n is the
code itself, and there is no one to cancel.
Suffixes: M query rows, T tokens of a group, D head size, E channels of a group, V pairs of channels.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class NumberFormat(NamedTuple):
    """How a code becomes a float.

    lift: bit of the fraction where the code begins. one: bit pattern of what it is added to. span: one over the
    difference that a code of 1 makes.
    """

    lift: int
    one: int
    span: float

    @classmethod
    def of(cls, factor: tl.dtype, bits: int) -> NumberFormat:
        """For codes of that many bits in a type of 16 bits; in fp32 the code is the number."""
        if factor == tl.float32:
            return cls(0, 0, 1.0)
        fraction, bias = {"bf16": (7, 127), "fp16": (10, 15)}[str(factor)]
        return cls(fraction - bits, bias << fraction, 2.0**bits)


@triton.jit
def _numbers(word_TV, shift, mask, ones, LIFT: tl.constexpr, FACTOR: tl.constexpr, T: tl.constexpr, E: tl.constexpr):
    """Floats of the codes from bit ``shift`` on, ``[T, E]``; a word of 32 bits holds two channels."""
    if tl.float32 == FACTOR:
        even_TV = ((word_TV >> shift) & mask).to(tl.float32)
        odd_TV = ((word_TV >> (shift + 16)) & mask).to(tl.float32)
    else:
        # A rotation, as the code may have to go up or down. It takes one instruction.
        turn, bits_TV = (shift - LIFT) & 31, word_TV.to(tl.uint32, bitcast=True)
        both_TV = ((bits_TV >> turn) | (bits_TV << (-turn & 31))).to(tl.int32, bitcast=True)
        both_TV = (both_TV & mask) | ones
        even_TV, odd_TV = both_TV.to(tl.int16), (both_TV >> 16).to(tl.int16)
    return tl.reshape(tl.join(even_TV, odd_TV), (T, E)).to(FACTOR, bitcast=True)


@triton.jit
def _rest(product, factor):
    """What a number's product with the other factor lacks, besides ``f n``."""
    return product if tl.float32 == factor.dtype else product - factor.to(tl.float32)


@triton.jit
def low_scores(
    q_DM, wide_q_DM, word_TV, levels_ptr, exist, shift, mask, ones, LIFT: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Dot products of a group's keys with the queries, which ``wide_q_DM`` holds times the span.

    ``levels_ptr`` is that group's.
    """
    d = tl.arange(0, D)
    scale_D = tl.load(levels_ptr + d, mask=exist & (d < D), other=0.0).to(tl.float32)
    zero_D = tl.load(levels_ptr + D + d, mask=exist & (d < D), other=0.0).to(tl.float32)
    factor_DM = (wide_q_DM * scale_D[:, None]).to(FACTOR)
    rest_M = tl.sum(_rest(q_DM * zero_D[:, None], factor_DM), axis=0)
    number_TD = _numbers(word_TV, shift, mask, ones, LIFT, FACTOR, T, D)
    return tl.dot(number_TD, factor_DM, input_precision="ieee") + rest_M[None, :]


@triton.jit
def add_low_values(
    o_EM, rest_TM, weight_TM, shrink_M, word_TV, levels_T, to_zero, exists_T, shift, mask, ones, SPAN: tl.constexpr,
    LIFT: tl.constexpr, T: tl.constexpr, E: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Weighted sum of a group's values, one group of channels; ``levels_T`` points to the tokens' scales.

    The sum over ``rest_TM`` belongs to every channel.
    """
    scale_T = tl.load(levels_T, mask=exists_T, other=0.0).to(tl.float32)
    zero_T = tl.load(levels_T + to_zero, mask=exists_T, other=0.0).to(tl.float32)
    factor_TM = (weight_TM * (scale_T * SPAN)[:, None]).to(FACTOR)
    rest_TM = rest_TM * shrink_M[None, :] + _rest(weight_TM * zero_T[:, None], factor_TM)
    number_ET = tl.trans(_numbers(word_TV, shift, mask, ones, LIFT, FACTOR, T, E))
    return tl.dot(number_ET, factor_TM, o_EM * shrink_M[None, :], input_precision="ieee"), rest_TM
