"""Selection keys against the reference's scores."""

import math

import pytest
import torch
from torch import Tensor

from dualdecoder.errors import ConfigError
from dualdecoder.kernels.scores import ScoreWorkspace, row_length, score_chunks, span_chunks
from dualdecoder.landmarks import NO_CHUNK, chunk_scores
from dualdecoder.ledger import Ledger

# Of the product's rounding to fp32; the operands are the same on both sides.
TOLERANCE = {"rtol": 2e-4, "atol": 1e-9}


def inputs(
    rows: int, heads: int, group: int, head_dim: int, chunks: int, excluded: int, batch: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, landmarks, chunk counts (the first sequence is full) and distinct excluded chunks, the last one none."""
    generator = torch.Generator().manual_seed(seed)
    q_BRHD = torch.randn(batch, rows, heads * group, head_dim, generator=generator) * 3
    landmarks_BKND = torch.randn(batch, heads, chunks, head_dim, generator=generator)
    chunks_B = torch.randint(0, chunks + 1, (batch,), generator=generator)
    chunks_B[0] = chunks
    excluded_BKO = torch.rand(batch, heads, chunks, generator=generator).argsort(dim=-1)[..., :excluded].contiguous()
    excluded_BKO[..., -1:] = NO_CHUNK
    return q_BRHD, landmarks_BKND, chunks_B, excluded_BKO


def poisoned(q_BRHD: Tensor, landmarks_BKND: Tensor, span: int = 0) -> ScoreWorkspace:
    (B, R, H, _), (K, N) = q_BRHD.shape, landmarks_BKND.shape[1:3]
    workspace = ScoreWorkspace.allocate(Ledger(q_BRHD.device), B, R, H, K, N, span)
    workspace.logits.fill_(torch.nan)
    workspace.logsumexps.fill_(torch.nan)
    return workspace


def keys(workspace: ScoreWorkspace, rows: int, heads: int, chunks_B: Tensor, chunks: int) -> Tensor:
    """The keys that the selection forms from the workspace, ``[B, R, K, N]``."""
    shape = (len(chunks_B), heads, rows, -1)
    logits_BKRGN = workspace.logits.view(*shape, row_length(chunks))[..., :chunks]
    part_BKRGS = workspace.logsumexps.view(*logits_BKRGN.shape[:4], -1)
    keys_BRKN = (logits_BKRGN - part_BKRGS.logsumexp(dim=-1, keepdim=True)).amax(dim=3).transpose(1, 2)
    beyond_BN = torch.arange(chunks, device=chunks_B.device) >= chunks_B[:, None]
    return keys_BRKN.masked_fill(beyond_BN[:, None, None], -torch.inf)


def assert_matches(arguments: tuple[Tensor, ...], dtype: torch.dtype, device: str, span: int = 0) -> None:
    q_BRHD, landmarks_BKND, chunks_B, excluded_BKO = (argument.to(device) for argument in arguments)
    q_BRHD, landmarks_BKND = q_BRHD.to(dtype), landmarks_BKND.to(dtype)
    workspace = poisoned(q_BRHD, landmarks_BKND, span)
    score_chunks(q_BRHD, landmarks_BKND, chunks_B, excluded_BKO, workspace)
    keys_BRKN = keys(workspace, q_BRHD.shape[1], landmarks_BKND.shape[1], chunks_B, landmarks_BKND.shape[2])
    expected_BRKN = chunk_scores(q_BRHD.double(), landmarks_BKND.double(), chunks_B, excluded_BKO)
    blocked_BRKN = expected_BRKN == -torch.inf
    assert torch.equal(keys_BRKN == -torch.inf, blocked_BRKN)
    scores_BRKN = keys_BRKN.exp().masked_fill(blocked_BRKN, -torch.inf)
    torch.testing.assert_close(scores_BRKN, expected_BRKN.float(), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "group", "head_dim", "chunks", "excluded", "batch"),
    [(2, 3, 4, 64, 301, 5, 3), (1, 2, 3, 16, 130, 7, 2), (2, 1, 8, 128, 128, 0, 1), (2, 2, 7, 32, 1, 1, 3)],
)
def test_matches_the_reference(
    rows: int, heads: int, group: int, head_dim: int, chunks: int, excluded: int, batch: int,
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    assert_matches(inputs(rows, heads, group, head_dim, chunks, excluded, batch), dtype, device)


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("span", [128, 1024])
def test_every_group_and_several_tiles_a_span(group: int, span: int, device: str) -> None:
    arguments = inputs(rows=1 + group % 2, heads=2, group=group, head_dim=16, chunks=523, excluded=40, batch=2)
    assert_matches(arguments, torch.bfloat16, device, span)


def test_large_logits_do_not_overflow(device: str) -> None:
    q_BRHD, *others = inputs(rows=2, heads=1, group=4, head_dim=32, chunks=200, excluded=3)
    assert_matches((q_BRHD * 30, *others), torch.float32, device)


def test_a_dominant_excluded_chunk_takes_no_part(device: str) -> None:
    q_BRHD, landmarks_BKND, chunks_B, excluded_BKO = inputs(1, 1, 1, 16, 150, 2)
    landmarks_BKND[0, 0, int(excluded_BKO[0, 0, 0])] = q_BRHD[0, 0, 0] * 50
    assert_matches((q_BRHD, landmarks_BKND, chunks_B, excluded_BKO), torch.float32, device)


def test_nothing_to_score(device: str) -> None:
    q_BRHD, landmarks_BKND, chunks_B, excluded_BKO = inputs(2, 2, 4, 16, 20, 3, batch=2)
    assert_matches((q_BRHD, landmarks_BKND, torch.zeros_like(chunks_B), excluded_BKO), torch.float32, device)
    everything_BKO = torch.arange(20).expand(2, 2, 20).contiguous()
    assert_matches((q_BRHD, landmarks_BKND, chunks_B, everything_BKO), torch.float32, device)


def test_garbage_behind_the_last_chunk_is_not_read(device: str) -> None:
    q_BRHD, landmarks_BKND, chunks_B, excluded_BKO = inputs(2, 1, 2, 16, 300, 2)
    chunks_B[0] = 131
    landmarks_BKND[:, :, 131:] = torch.nan
    arguments = [argument.to(device) for argument in (q_BRHD, landmarks_BKND, chunks_B, excluded_BKO)]
    workspace = poisoned(*arguments[:2])
    score_chunks(*arguments, workspace)
    assert not keys(workspace, 2, 1, arguments[2], 300).isnan().any()


def test_queries_may_be_a_view_of_all_heads(device: str) -> None:
    q_BRHD, *others = (argument.to(device) for argument in inputs(2, 2, 3, 16, 140, 2, batch=2))
    fused_BRHD = torch.full((3, 2, 11, 16), torch.nan, device=device)
    fused_BRHD[1:, :, 2:8] = q_BRHD
    view_BRHD = fused_BRHD[1:, :, 2:8]
    workspaces = poisoned(q_BRHD, others[0]), poisoned(q_BRHD, others[0])
    for query_BRHD, workspace in zip((q_BRHD, view_BRHD), workspaces, strict=True):
        score_chunks(query_BRHD, *others, workspace)
    assert torch.equal(*(keys(workspace, 2, 2, others[1], 140) for workspace in workspaces))


def test_small_batches_get_short_spans() -> None:
    assert span_chunks(batch=24, kv_heads=8, chunks=16384) == 1024
    assert span_chunks(batch=1, kv_heads=8, chunks=16384) == 512
    assert span_chunks(batch=1, kv_heads=1, chunks=16384) == 128


def test_refuses_what_it_cannot_do(device: str) -> None:
    q_BRHD, landmarks_BKND, chunks_B, excluded_BKO = (t.to(device) for t in inputs(2, 2, 4, 16, 20, 3))
    workspace = poisoned(q_BRHD, landmarks_BKND)
    small = ScoreWorkspace.allocate(Ledger(device), 1, 1, 8, 2, 20)
    with pytest.raises(ConfigError, match="workspace"):
        score_chunks(q_BRHD, landmarks_BKND, chunks_B, excluded_BKO, small)
    with pytest.raises(ConfigError, match="head_dim"):
        cut = (q_BRHD[..., :12].contiguous(), landmarks_BKND[..., :12].contiguous())
        score_chunks(*cut, chunks_B, excluded_BKO, workspace)
    with pytest.raises(ConfigError, match="stride"):
        score_chunks(q_BRHD.mT.contiguous().mT, landmarks_BKND, chunks_B, excluded_BKO, workspace)
    with pytest.raises(ConfigError, match="excluded"):
        score_chunks(q_BRHD, landmarks_BKND, chunks_B, excluded_BKO[:, :1], workspace)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "chunks", "dtype"),
    [(16, 16384, torch.bfloat16), (1, 65536, torch.float16), (2, 16001, torch.float32)],
)
def test_large(batch: int, chunks: int, dtype: torch.dtype) -> None:
    arguments = inputs(rows=2, heads=8, group=4, head_dim=128, chunks=chunks, excluded=48, batch=batch)
    assert math.prod(arguments[1].shape) > 2**24
    assert_matches(arguments, dtype, "cuda")
