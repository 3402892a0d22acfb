"""Block scores against the reference, in poisoned memory."""

import pytest
import torch
from torch import Tensor

from baselines.kernels.bounds import score_bounds, span_blocks
from baselines.summaries import bound_scores, key_bounds
from dualdecoder.errors import ConfigError
from dualdecoder.kernels.scores import row_length

# Of the sum's rounding in fp32, relative to the sum of its terms' sizes; the operands are the same on both sides.
TOLERANCE = 1e-6


def inputs(
    rows: int, heads: int, group: int, head_dim: int, blocks: int, batch: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, bounds and block counts; the first sequence is full."""
    generator = torch.Generator().manual_seed(seed)
    q_BRHD = torch.randn(batch, rows, heads * group, head_dim, generator=generator) * 3
    keys_BKNCD = torch.randn(batch, heads, blocks, 3, head_dim, generator=generator)
    blocks_B = torch.randint(0, blocks + 1, (batch,), generator=generator)
    blocks_B[0] = blocks
    return q_BRHD, key_bounds(keys_BKNCD), blocks_B


def scored(q_BRHD: Tensor, bounds_BKNYD: Tensor, blocks_B: Tensor) -> Tensor:
    """What the kernel writes, ``[B, R, K, N]``, NaN where it writes nothing."""
    (B, R), (K, N) = q_BRHD.shape[:2], bounds_BKNYD.shape[1:3]
    scores_BKRN = torch.full((B, K, R, row_length(N)), torch.nan, device=q_BRHD.device)
    score_bounds(q_BRHD, bounds_BKNYD, blocks_B, scores_BKRN)
    assert scores_BKRN[..., N:].isnan().all()
    return scores_BKRN[..., :N].transpose(1, 2)


def assert_matches(arguments: tuple[Tensor, ...], dtype: torch.dtype, device: str) -> None:
    q_BRHD, bounds_BKNYD, blocks_B = (argument.to(device) for argument in arguments)
    q_BRHD, bounds_BKNYD = q_BRHD.to(dtype), bounds_BKNYD.to(dtype)
    exists_BN = torch.arange(bounds_BKNYD.shape[2], device=device) < blocks_B[:, None]
    # Bounds of blocks that do not exist are not read.
    poisoned_BKNYD = bounds_BKNYD.masked_fill(~exists_BN[:, None, :, None, None], torch.nan)
    got_BRKN = scored(q_BRHD, poisoned_BKNYD, blocks_B)
    expected_BRKN = bound_scores(q_BRHD.double(), bounds_BKNYD.double(), blocks_B)
    exists_BRKN = exists_BN[:, None, None].expand_as(got_BRKN)
    assert got_BRKN[~exists_BRKN].isnan().all()
    size = float(q_BRHD.float().abs().amax() * bounds_BKNYD.float().abs().amax() * q_BRHD.shape[-1])
    torch.testing.assert_close(got_BRKN[exists_BRKN], expected_BRKN[exists_BRKN], rtol=0, atol=TOLERANCE * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "group", "head_dim", "blocks", "batch"),
    [(1, 3, 4, 64, 301, 3), (2, 2, 4, 128, 130, 2), (2, 1, 8, 16, 64, 1), (1, 2, 7, 32, 1, 3), (1, 1, 16, 16, 65, 2)],
)
def test_matches_the_reference(
    rows: int, heads: int, group: int, head_dim: int, blocks: int, batch: int, dtype: torch.dtype, device: str
) -> None:
    assert_matches(inputs(rows, heads, group, head_dim, blocks, batch), dtype, device)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group(group: int, device: str) -> None:
    assert_matches(inputs(rows=1 + group % 2, heads=2, group=group, head_dim=16, blocks=147), torch.bfloat16, device)


def test_a_block_behind_many_tiles(device: str) -> None:
    """Spans of several tiles, with a rest."""
    assert span_blocks(heads=1000, blocks=2500, tile=64) == 1024
    assert span_blocks(heads=8, blocks=7625, tile=64) == 128
    assert span_blocks(heads=1, blocks=10, tile=64) == 64
    assert_matches(inputs(rows=1, heads=128, group=1, head_dim=16, blocks=300, batch=2), torch.float16, device)


def test_nothing_to_score(device: str) -> None:
    q_BRHD, bounds_BKNYD, blocks_B = inputs(1, 2, 4, 16, 20, batch=2)
    assert_matches((q_BRHD, bounds_BKNYD, torch.zeros_like(blocks_B)), torch.float32, device)


def test_queries_may_be_a_row_of_all_heads(device: str) -> None:
    q_BRHD, bounds_BKNYD, blocks_B = (t.to(device) for t in inputs(1, 2, 3, 16, 140, batch=2))
    fused_BRHD = torch.full((2, 2, 11, 16), torch.nan, device=device)
    fused_BRHD[:, 1:, 2:8] = q_BRHD
    got, expected = (scored(q, bounds_BKNYD, blocks_B) for q in (fused_BRHD[:, 1:, 2:8], q_BRHD))
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_refuses_what_it_cannot_do(device: str) -> None:
    q_BRHD, bounds_BKNYD, blocks_B = (t.to(device) for t in inputs(2, 2, 4, 16, 20))
    scores_BKRN = torch.empty(1, 2, 2, 32, device=device)
    with pytest.raises(ConfigError, match="scores"):
        score_bounds(q_BRHD, bounds_BKNYD, blocks_B, scores_BKRN[..., :20].contiguous())
    with pytest.raises(ConfigError, match="head_dim"):
        score_bounds(q_BRHD[..., :12].contiguous(), bounds_BKNYD[..., :12].contiguous(), blocks_B, scores_BKRN)
    with pytest.raises(ConfigError, match="stride"):
        score_bounds(q_BRHD.mT.contiguous().mT, bounds_BKNYD, blocks_B, scores_BKRN)
    with pytest.raises(ConfigError, match="dtype"):
        score_bounds(q_BRHD.half(), bounds_BKNYD, blocks_B, scores_BKRN)
    with pytest.raises(ConfigError, match="query_heads"):
        score_bounds(q_BRHD.repeat(1, 1, 3, 1), bounds_BKNYD, blocks_B, scores_BKRN)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "blocks", "dtype"), [(16, 8192, torch.bfloat16), (1, 32768, torch.float16), (2, 8001, torch.float32)]
)
def test_large(batch: int, blocks: int, dtype: torch.dtype) -> None:
    assert_matches(inputs(rows=1, heads=8, group=4, head_dim=128, blocks=blocks, batch=batch), dtype, "cuda")
