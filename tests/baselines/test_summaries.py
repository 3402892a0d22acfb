"""Bounds of blocks: no key of a block scores more than its block; sizes and settings."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from baselines.oasiskv import OasisKVConfig
from baselines.quest import QuestConfig
from baselines.summaries import BLOCK, bound_scores, key_bounds, split_prompt
from dualdecoder.errors import ConfigError
from tests.baselines.block_reference import bound


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3), rows=st.integers(1, 2), heads=st.integers(1, 3), group=st.integers(1, 4),
    head_dim=st.sampled_from([1, 5, 16]), blocks=st.integers(1, 7), scale=st.sampled_from([0.01, 1.0, 100.0]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_no_key_scores_more_than_its_block(batch, rows, heads, group, head_dim, blocks, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_BRHD = torch.randn(batch, rows, heads * group, head_dim, generator=generator) * scale
    k_BKNCD = torch.randn(batch, heads, blocks, BLOCK, head_dim, generator=generator)
    existing_B = torch.randint(0, blocks + 1, (batch,), generator=generator)
    scores_BRKN = bound_scores(q_BRHD, key_bounds(k_BKNCD), existing_B)
    assert scores_BRKN.shape == (batch, rows, heads, blocks)
    q_BRKGD = q_BRHD.double().unflatten(2, (heads, group))
    true_BRKN = torch.einsum("brkgd,bkncd->brkgnc", q_BRKGD, k_BKNCD.double()).sum(dim=3).amax(dim=-1)
    exists_BRKN = (torch.arange(blocks) < existing_B[:, None])[:, None, None].expand_as(scores_BRKN)
    slack = 1e-5 * scale * head_dim * group
    assert (scores_BRKN + slack >= true_BRKN)[exists_BRKN].all()
    assert (scores_BRKN[~exists_BRKN] == -torch.inf).all()


def test_scores_equal_the_definition() -> None:
    torch.manual_seed(0)
    q_BRHD, k_BKNCD = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 5, BLOCK, 8)
    got = bound_scores(q_BRHD, key_bounds(k_BKNCD), torch.tensor([5]))
    for row, head, block in np.ndindex(2, 2, 5):
        q_GD = q_BRHD[0, row, 3 * head : 3 * head + 3].numpy()
        assert_allclose(float(got[0, row, head, block]), bound(q_GD, k_BKNCD[0, head, block].numpy()), rtol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 40])
def test_a_prompt_is_its_blocks_and_its_tail(tokens: int) -> None:
    k_TKD, v_TKD = torch.randn(2, tokens, 3, 4)
    records_KNXCD, tail_KXTD = split_prompt(k_TKD, v_TKD)
    assert records_KNXCD.shape == (3, tokens // BLOCK, 2, BLOCK, 4)
    joined_KXTD = torch.cat((records_KNXCD.transpose(1, 2).flatten(2, 3), tail_KXTD), dim=2)
    assert torch.equal(joined_KXTD, torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3))


def test_settings() -> None:
    assert QuestConfig().attended_tokens == OasisKVConfig().attended_tokens == 2464
    assert QuestConfig().blocks == OasisKVConfig().blocks == 153
    assert OasisKVConfig().cap == 8
    assert OasisKVConfig(budget=2064).cap == 6
    assert OasisKVConfig(budget=32).cap == 1
    for config in (QuestConfig, OasisKVConfig):
        for budget in (0, 16, 40):
            with pytest.raises(ConfigError, match=f"budget={budget}"):
                config(budget=budget)
    with pytest.raises(ConfigError, match="dense_layers=-1"):
        QuestConfig(dense_layers=-1)
    for ratio in (0.0, 1.5):
        with pytest.raises(ConfigError, match="fetch_ratio"):
            OasisKVConfig(fetch_ratio=ratio)
    with pytest.raises(ConfigError, match="host_sequences"):
        OasisKVConfig(host_sequences=-1)
