"""The quantiser and the packed cache: error bounds, round trips, and the cache against one that is built in one go."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baselines.lowbit import BITS, LowBitCache, codes_per_word, dequantise, pack, quantise, unpack
from dualdecoder.config import ModelConfig
from dualdecoder.errors import ConfigError
from dualdecoder.ledger import Ledger

SHAPE = ModelConfig("two-heads", 1, 8, 8, 2, 2, 12, 16, 4096)
ROUNDING = {torch.float32: 2**-21, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@given(
    st.sampled_from([1, 2]),
    st.integers(1, 70),
    st.integers(0, 10**6),
    st.floats(-3, 3),
    st.sampled_from(list(ROUNDING)),
)
def test_a_number_is_at_most_half_a_step_from_its_level(
    bits: int, size: int, seed: int, power: float, dtype: torch.dtype
) -> None:
    x = (normal(5, size, seed=seed) * 10**power + normal(5, 1, seed=seed + 1)).to(dtype)
    codes, scale, zero = quantise(x, 1, bits)
    assert codes.dtype == torch.int16 and int(codes.max()) < 2**bits
    assert scale.shape == zero.shape == (5, 1) and scale.dtype == zero.dtype == dtype
    error = (dequantise(codes, scale, zero).double() - x.double()).abs()
    # Scale and zero are stored in the dtype of the numbers, and so is the result.
    assert (error <= scale.double() / 2 + ROUNDING[dtype] * x.double().abs().amax(1, keepdim=True)).all()


@given(st.sampled_from([1, 2]), st.floats(-1000, 1000, width=32), st.integers(1, 9))
def test_a_group_without_a_range_is_kept(bits: int, value: float, size: int) -> None:
    x = torch.full((3, size), value)
    codes, scale, zero = quantise(x, 1, bits)
    assert not codes.any() and not scale.any()
    torch.testing.assert_close(dequantise(codes, scale, zero), x, rtol=2**-22, atol=1e-38)


def test_levels_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.9, 5.1, 8.0]])
    codes, scale, zero = quantise(x, 1, 1)
    assert codes.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert dequantise(codes, scale, zero).tolist() == [[2, 2, 2, 2, 6, 6]]
    codes, scale, zero = quantise(torch.tensor([[0.0, 1.4, 1.6, 4.0, 9.0]]), 1, 2)
    assert codes.tolist() == [[0, 0, 1, 1, 3]]
    assert dequantise(codes, scale, zero).tolist() == [[0, 0, 3, 3, 9]]


@given(st.sampled_from([1, 2]), st.integers(0, 19), st.integers(1, 5), st.integers(1, 5), st.integers(0, 999))
def test_packing_loses_nothing(bits: int, groups: int, tokens: int, channels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (groups, tokens, channels), generator=generator, dtype=torch.int16)
    packed = pack(codes, bits)
    assert packed.shape == (-(-groups // codes_per_word(bits)), tokens, channels) and packed.dtype == torch.int16
    assert torch.equal(unpack(packed, bits)[:groups], codes)
    assert not unpack(packed, bits)[groups:].any()


def make_cache(bits: int, batch: int, context: int, group: int, dtype: torch.dtype = torch.float32) -> LowBitCache:
    cache = LowBitCache.allocate(SHAPE, batch, context, bits, group, dtype, Ledger("cpu"))
    # Whatever the memory held before must not matter.
    cache.fill_random(torch.Generator().manual_seed(99))
    return cache


def seen(cache: LowBitCache, sequence: int, length: int) -> Tensor:
    """Keys and values ``[K, 2, length, D]`` as attention sees them."""
    low = cache.dequantised()[sequence, :, :, :length].clone()
    recent = torch.arange(max(0, length - cache.group), length)
    low[:, :, recent] = cache.ring_BKXWD[sequence, :, :, recent % cache.group]
    return low


@given(
    st.sampled_from(BITS),
    st.sampled_from([4, 6]),
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(0, 60),
    st.integers(0, 999),
)
def test_committing_equals_writing_a_longer_prompt(
    bits: int, group: int, prompts: list[int], steps: int, seed: int
) -> None:
    """Ragged batches in which each sequence commits in some steps only."""
    batch, context = len(prompts), max(prompts) + steps + 1
    cache = make_cache(bits, batch, context, group)
    k_BTKD, v_BTKD = normal(2, batch, context, 2, 12, seed=seed)
    for b, tokens in enumerate(prompts):
        cache.write_prompt(b, k_BTKD[b, :tokens], v_BTKD[b, :tokens])
    length_B, generator = torch.tensor(prompts), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        commit_B = torch.rand(batch, generator=generator) < 0.7
        row_B = torch.arange(batch)
        cache.commit(k_BTKD[row_B, length_B], v_BTKD[row_B, length_B], length_B, commit_B)
        length_B = length_B + commit_B
    for b, length in enumerate(length_B.tolist()):
        whole = make_cache(bits, 1, context, group)
        whole.write_prompt(0, k_BTKD[b, :length], v_BTKD[b, :length])
        torch.testing.assert_close(seen(cache, b, length), seen(whole, 0, length), rtol=0, atol=0)


def test_what_is_exact_is_the_tail_of_keys_and_the_last_values() -> None:
    k_TKD, v_TKD = normal(2, 27, 2, 12, seed=3)
    cache = make_cache(2, 1, 40, 6)
    cache.write_prompt(0, k_TKD, v_TKD)
    for exact, got_KTD, given_TKD in ((24, *_pair(cache, 0, k_TKD)), (21, *_pair(cache, 1, v_TKD))):
        same_T = (got_KTD == given_TKD.transpose(0, 1)).all(dim=2).all(dim=0)
        assert same_T.tolist() == [t >= exact for t in range(27)]


def _pair(cache: LowBitCache, half: int, given_TKD: Tensor) -> tuple[Tensor, Tensor]:
    return seen(cache, 0, 27)[:, half], given_TKD


def test_16_bits_change_nothing() -> None:
    k_TKD, v_TKD = normal(2, 27, 2, 12, seed=3).to(torch.bfloat16)
    cache = make_cache(16, 1, 40, 6, torch.bfloat16)
    cache.write_prompt(0, k_TKD, v_TKD)
    assert torch.equal(seen(cache, 0, 27), torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3))


def test_channels_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.head_dim=12 is not allowed; allowed: a multiple of group \(8 chan"):
        LowBitCache.allocate(SHAPE, 1, 16, 2, 8, torch.float32, Ledger("cpu"))
