"""Sampling: distribution, cuts, seeds, and noise shared by speculated and real rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualdecoder.config import SamplingConfig
from dualdecoder.engine import Engine
from dualdecoder.sampling import Sampler, SelfSpeculator


def draws(config: SamplingConfig, logits: torch.Tensor, count: int) -> torch.Tensor:
    return Sampler(config)(logits.expand(count, 1, -1), torch.arange(count))[:, 0]


def test_greedy_is_argmax() -> None:
    logits = torch.randn(3, 2, 50)
    assert torch.equal(Sampler(SamplingConfig())(logits, torch.zeros(3)), logits.argmax(-1))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = (logits / 0.8).softmax(-1)
    counts = draws(SamplingConfig(temperature=0.8, seed=3), logits, 4000).bincount(minlength=4) / 4000
    # Four standard deviations of a binomial share with 4,000 draws are at most 0.032.
    assert (counts - expected).abs().max() < 0.032


def test_cuts() -> None:
    logits = torch.tensor([0.1, 3.0, 2.9, 0.0, -5.0])
    assert set(draws(SamplingConfig(temperature=5.0, top_k=2), logits, 300).tolist()) == {1, 2}
    # Shares at temperature 1 are 0.50 and 0.45 for the best two: 0.6 needs both, 0.4 one.
    assert set(draws(SamplingConfig(temperature=1.0, top_p=0.6), logits, 300).tolist()) == {1, 2}
    assert set(draws(SamplingConfig(temperature=1.0, top_p=0.4), logits, 300).tolist()) == {1}


@given(st.floats(5e-324, 1e-5, exclude_max=True), st.sampled_from([1e-30, 1.0, 1e4, 3e38]), st.integers(0, 99))
def test_a_degenerate_temperature_is_greedy(temperature: float, scale: float, seed: int) -> None:
    logits = torch.rand(2, 1, 50, generator=torch.Generator().manual_seed(seed)) * scale
    for cut in ({}, {"top_k": 5}, {"top_p": 0.9}):
        chosen = Sampler(SamplingConfig(temperature, seed=seed, **cut))(logits, torch.tensor([3, 4]))
        assert torch.equal(chosen, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0])
def test_huge_logits_do_not_overflow(temperature: float) -> None:
    logits = torch.tensor([3.0e38, 3.1e38, -3.0e38])
    assert set(draws(SamplingConfig(temperature, top_p=0.9), logits, 50).tolist()) == {1}


def test_a_huge_temperature_is_uniform() -> None:
    assert set(draws(SamplingConfig(1e300), torch.tensor([30.0, 0.0, -30.0]), 100).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("cut", [{"top_p": 1.0}, {"top_p": 1}, {"top_k": 50_000}, {"top_k": 10**30}])
def test_cuts_that_keep_all(cut: dict) -> None:
    logits = 2 * torch.randn(1, 1, 49152, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Sampler(SamplingConfig(1.0, **cut))._cut(logits), logits)


def test_row_1_draws_as_row_0_does_one_step_later() -> None:
    sampler = Sampler(SamplingConfig(temperature=1.0, seed=1))
    logits = torch.randn(2, 1000)
    position_B = torch.tensor([7, 30])
    ahead = sampler(torch.stack((torch.randn(2, 1000), logits), dim=1), position_B)[:, 1]
    assert torch.equal(ahead, sampler(logits[:, None], position_B + 1)[:, 0])
    assert not torch.equal(
        draws(SamplingConfig(1.0, seed=1), logits[0], 20), draws(SamplingConfig(1.0, seed=2), logits[0], 20)
    )


def test_sampled_decoding_is_seeded_and_independent_of_prefetch(tiny: Engine, random_ids) -> None:
    prompts = [random_ids(200), random_ids(100, 1)]

    def tokens(seed: int, **options: object) -> list[list[int]]:
        engine = tiny.with_method("dualdecoder", budget=64, **options)
        sampling = SamplingConfig(temperature=0.7, top_p=0.9, seed=seed)
        return [c.token_ids for c in engine.generate(prompts, 24, sampling)]

    assert tokens(5) == tokens(5) == tokens(5, schedule="on_demand") == tokens(5, speculation="random")
    assert tokens(5) != tokens(6)


def test_speculator_kinds() -> None:
    token_B, true_B, guess_B = torch.tensor([5, 6]), torch.tensor([1, 2]), torch.tensor([3, 4])
    active_B = torch.tensor([True, True])
    own = SelfSpeculator("self", 10**9, seed=0)
    assert torch.equal(own.first(token_B, true_B, active_B), true_B)
    assert torch.equal(own.following(token_B, guess_B, active_B), guess_B)
    first = SelfSpeculator("random_first", 10**9, seed=0)
    assert not torch.equal(first.first(token_B, true_B, active_B), true_B)
    assert torch.equal(first.following(token_B, guess_B, active_B), guess_B)
    always = SelfSpeculator("random", 10**9, seed=0)
    assert not torch.equal(always.following(token_B, guess_B, active_B), guess_B)
