"""Tiles of low-bit tokens for a program of one warp: what a thread loads is what it hands to the matrix unit.

No number moves between threads. For that the unit must not see neighbours in their order, but so that a thread has
``RUN`` of them in a row: a sum does not care. Rows are loaded in parts of at most 32 numbers, so that eight rows of
four threads read 16 bytes each. The token of row 8 j + a of a tile is J a + j: a thread has J tokens one after another.
With more warps, or other shapes than D >= 32 and T = 32, the compiler moves numbers; the results are the same.
Suffixes: M query rows (8 or 16), T tokens of a tile, W tokens of a group, D head size, E channels of a group of values,
X rows of parts, V words of 32 bits (two numbers each) or I numbers of a part, A = 8 and J = T / 8 as above, N groups of
keys, H = M / 2. An axis of 4 is the same four times, once for each thread of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers of a part, and how many of them a thread loads.
PART = tl.constexpr(32)
THREAD = tl.constexpr(8)
# Neighbours that the matrix unit takes from a thread at a time: Triton's choice for unpacked numbers, and for others.
WORD_RUN, RUN = tl.constexpr(4), tl.constexpr(2)


@triton.jit
def unit_order(x, ROWS: tl.constexpr, N: tl.constexpr, RUN: tl.constexpr):
    """``[ROWS, N]`` of a loaded tile, columns in the matrix unit's order; a row's parts lie ``ROWS`` rows apart."""
    WIDTH: tl.constexpr = N if N < PART else PART
    x = tl.reshape(x, (N // WIDTH, ROWS, WIDTH // THREAD, THREAD // RUN, RUN))
    return tl.reshape(tl.permute(x, (1, 0, 3, 2, 4)), (ROWS, N))


@triton.jit
def of_rows(x_A4J, T: tl.constexpr, M: tl.constexpr):
    """``[T, H, 1]``: what tokens have, by row, for all pairs of columns of a tile of scores."""
    x = tl.reshape(tl.permute(x_A4J, (2, 0, 1)), (T // 8, 8, 1, 4))
    return tl.reshape(tl.broadcast_to(x, (T // 8, 8, M // 8, 4)), (T, M // 2, 1))


@triton.jit
def by_column(x_TH1, T: tl.constexpr, M: tl.constexpr):
    """The same as ``[T, M]``."""
    return tl.reshape(tl.broadcast_to(x_TH1, (T, M // 2, 2)), (T, M))


@triton.jit
def to_tokens(x_TM, T: tl.constexpr, M: tl.constexpr):
    """``[M, T]``, from the order of rows to that of tokens."""
    return tl.reshape(tl.permute(tl.reshape(x_TM, (T // 8, 8, M)), (2, 1, 0)), (M, T))


@triton.jit
def sum_by_thread(x_TM, T: tl.constexpr, M: tl.constexpr):
    """``[A, M]``: the sum over what a thread has; the sum over the threads can wait."""
    return tl.sum(tl.reshape(x_TM, (T // 8, 8, M)), axis=0)


@triton.jit
def row_tokens(first, T: tl.constexpr):
    """The token of each row, ``[T]``."""
    t = tl.arange(0, T)
    return first + t % 8 * (T // 8) + t // 8


@triton.jit
def run_tokens(first, T: tl.constexpr, J: tl.constexpr):
    """The first J tokens of each thread, ``[A, 4, J]``."""
    a, four, j = tl.arange(0, 8)[:, None, None], tl.arange(0, 4)[None, :, None], tl.arange(0, J)[None, None, :]
    return first + a * (T // 8) + j + four * 0


@triton.jit
def load_queries(q_ptr, q_stride_r, q_stride_h, G: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """``[X, I]``, zeros for padding."""
    WIDTH: tl.constexpr = D if D < PART else PART
    x, i = tl.arange(0, D // WIDTH * M)[:, None], tl.arange(0, WIDTH)[None, :]
    at_XI = x % M // G * q_stride_r + x % M % G * q_stride_h + x // M * WIDTH + i
    return tl.load(q_ptr + at_XI, mask=x % M < R * G, other=0.0)


@triton.jit
def load_keys(words_ptr, T: tl.constexpr, D: tl.constexpr):
    """Words of T tokens, ``[X, V]``."""
    WIDTH: tl.constexpr = D if D < PART else PART
    x, v = tl.arange(0, D // WIDTH * T)[:, None], tl.arange(0, WIDTH // 2)[None, :]
    token_X1 = x % 8 * (T // 8) + x % T // 8
    return tl.load(words_ptr + token_X1 * (D // 2) + x // T * (WIDTH // 2) + v)


@triton.jit
def load_values(words_ptr, T: tl.constexpr, W: tl.constexpr, E: tl.constexpr):
    """Words of T tokens, ``[E, V]``: of two neighbouring tokens each."""
    e, v = tl.arange(0, E)[:, None], tl.arange(0, T // 2)[None, :]
    return tl.load(words_ptr + e * (W // 2) + v)


@triton.jit
def load_key_levels(levels_ptr, group, low, ROWS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Scales or zeros ``[X, I]`` of ``group`` in all rows (``STEP`` 0) or of one group a row (1); 0 from ``low`` on."""
    WIDTH: tl.constexpr = D if D < PART else PART
    x, i = tl.arange(0, D // WIDTH * ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    group_X1 = group + x % ROWS * STEP
    return tl.load(levels_ptr + group_X1 * (2 * D) + x // ROWS * WIDTH + i, mask=group_X1 * W < low, other=0.0)


@triton.jit
def load_value_levels(levels_ptr, first, low, to_zero, T: tl.constexpr):
    """Scales and zeros ``[A, 4, J]``. Of a run that ``low`` cuts they are loaded whole, for the sake of vectors."""
    at_A4J, exists_A41 = levels_ptr + run_tokens(first, T, T // 8), run_tokens(first, T, 1) < low
    return tl.load(at_A4J, mask=exists_A41, other=0.0), tl.load(at_A4J + to_zero, mask=exists_A41, other=0.0)


@triton.jit
def load_marks(marked_ptr, first, low, T: tl.constexpr):
    """Marks ``[A, 4, J]``, of whole runs like levels."""
    return tl.load(marked_ptr + run_tokens(first, T, T // 8), mask=run_tokens(first, T, 1) < low, other=1)
