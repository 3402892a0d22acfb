"""Step attention against a loop over tokens."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dualdecoder.attention import step_attention


@given(
    rows=st.integers(1, 2),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    past=st.integers(0, 7),
    seed=st.integers(0, 999),
)
def test_rows_see_allowed_past_and_earlier_rows(rows: int, heads: int, group: int, past: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = draw(2, rows, heads * group, 4), draw(2, rows, heads, 4), draw(2, rows, heads, 4)
    past_kv, allowed = draw(2, heads, 2, past, 4), draw(2, heads, past) > 0
    # What is not allowed may be anything finite.
    past_kv[~allowed[:, :, None].expand(-1, -1, 2, -1)] = 1e4
    got = step_attention(q, k, v, past_kv, allowed)
    for b, row, head in np.ndindex(2, rows, heads * group):
        kv_head = head // group
        keep = allowed[b, kv_head]
        keys = torch.cat((past_kv[b, kv_head, 0][keep], k[b, : row + 1, kv_head])).double().numpy()
        values = torch.cat((past_kv[b, kv_head, 1][keep], v[b, : row + 1, kv_head])).double().numpy()
        weights = np.exp(keys @ q[b, row, head].double().numpy() / 2)
        expected = weights @ values / weights.sum()
        assert_allclose(got[b, row, head].numpy(), expected, rtol=1e-4, atol=1e-5)
