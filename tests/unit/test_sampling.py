"""Sampling: distribution, cuts, seeds, and noise shared by speculated and real rows."""

import torch

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
