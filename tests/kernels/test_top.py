"""Exact top-S against the sorting reference, from given keys and together with the scores."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualdecoder.errors import ConfigError
from dualdecoder.kernels.scores import MAX_SPAN, ScoreWorkspace, row_length, score_chunks
from dualdecoder.kernels.top import TopWorkspace, select_top
from dualdecoder.landmarks import NO_CHUNK, chunk_scores, mark_chunks, top_chunks
from dualdecoder.ledger import Ledger

# The interpreter warns of guesses between infinities, made good by the clamp, and of logarithms of empty counts.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
POISON = -77
# Of scores that rounding may order either way.
SWAPPED = 2e-4


def as_scores(keys_BRKN: Tensor) -> ScoreWorkspace:
    """Keys as the logits of groups of one, with logsumexps of 0."""
    chunks = keys_BRKN.shape[-1]
    padding = (0, row_length(chunks) - chunks)
    logits = F.pad(keys_BRKN.transpose(1, 2), padding, value=torch.nan).flatten()
    spans = -(-chunks // MAX_SPAN)
    logsumexps = torch.full((*keys_BRKN.shape[:3], spans), -1e30, device=keys_BRKN.device)
    logsumexps[..., -1] = 0
    return ScoreWorkspace(logits, logsumexps.flatten(), MAX_SPAN)


def poisoned(rows: int, chunks: int, count: int, segment: int, device: str | torch.device) -> TopWorkspace:
    workspace = TopWorkspace.allocate(Ledger(device), rows, chunks, count, segment)
    workspace.candidates.fill_(POISON)
    return workspace


def selected(keys_BRKN: Tensor, count: int, segment: int = 0) -> Tensor:
    """What the kernel writes, into poisoned memory."""
    B, R, K, N = keys_BRKN.shape
    workspace = poisoned(B * R * K, N, count, segment, keys_BRKN.device)
    chunks_B = torch.full((B,), N, device=keys_BRKN.device)
    out_BRKS = torch.full((B, R, K, count), POISON, device=keys_BRKN.device)
    select_top(as_scores(keys_BRKN), chunks_B, 1, N, out_BRKS, workspace)
    return out_BRKS


def random_keys(*shape: int, device: str, seed: int = 0) -> Tensor:
    """Normal keys, a tenth of them -inf."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(shape, generator=generator) * 6 - 20
    return keys.masked_fill(torch.rand(shape, generator=generator) < 0.1, -torch.inf).to(device)


@pytest.mark.parametrize(
    ("shape", "count", "segment"),
    [
        ((1, 1, 1, 1), 1, 0),
        ((3, 2, 3, 1000), 37, 0),
        ((1, 2, 1, 1025), 1024, 0),
        ((2, 1, 3, 1000), 37, 128),
        ((1, 2, 2, 1111), 256, 512),
        ((1, 1, 2, 300), 200, 128),
    ],
)
def test_matches_the_reference(shape: tuple[int, ...], count: int, segment: int, device: str) -> None:
    keys_BRKN = random_keys(*shape, device=device)
    assert torch.equal(selected(keys_BRKN, count, segment), top_chunks(keys_BRKN, count))


LEVELS = [-torch.inf, -3.0, -1e-40, -0.0, 0.0, 1e-40, 2.5, torch.inf]


@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(st.sampled_from(LEVELS) | st.floats(width=32, allow_nan=False), min_size=1, max_size=70),
    count=st.integers(1, 20),
    segment=st.sampled_from([0, 16, 64]),
)
def test_ties_go_to_the_smaller_chunk(keys: list[float], count: int, segment: int, device: str) -> None:
    keys_BRKN = torch.tensor(keys, device=device)[None, None, None]
    assert torch.equal(selected(keys_BRKN, count, segment), top_chunks(keys_BRKN, count))


def test_all_keys_equal(device: str) -> None:
    keys_BRKN = torch.full((1, 1, 1, 200), -5.0, device=device)
    assert selected(keys_BRKN, 9, 64).flatten().tolist() == list(range(9))


def test_no_candidate_leaves_empty_places(device: str) -> None:
    keys_BRKN = torch.full((2, 1, 1, 50), -torch.inf, device=device)
    assert (selected(keys_BRKN, 5) == NO_CHUNK).all()


@pytest.mark.parametrize("segment", [0, 128])
@pytest.mark.parametrize(("rows", "group"), [(1, 1), (2, 3), (2, 8)])
def test_scores_and_selection_match_the_reference(rows: int, group: int, segment: int, device: str) -> None:
    assert_selects(batch=2, rows=rows, group=group, head_dim=16, chunks=333, count=40, segment=segment, device=device)


def assert_selects(
    *, batch: int, rows: int, group: int, head_dim: int, chunks: int, count: int, segment: int, device: str
) -> None:
    """Both halves on random data, the second sequence shorter, against fp64 scores."""
    heads, generator = 2, torch.Generator().manual_seed(0)
    q_BRHD = torch.randn(batch, rows, heads * group, head_dim, generator=generator).to(device)
    landmarks_BKND = torch.randn(batch, heads, chunks, head_dim, generator=generator).to(device)
    chunks_B = torch.full((batch,), chunks, device=device)
    chunks_B[1:] = chunks - 77
    excluded_BKO = torch.arange(3, 10, device=device).expand(batch, heads, -1).contiguous()
    scores = ScoreWorkspace.allocate(Ledger(device), batch, rows, heads * group, heads, chunks, 128)
    scores.logits.fill_(torch.nan)
    workspace = poisoned(batch * rows * heads, chunks, count, segment, device)
    out_BRKS = torch.full((batch, rows, heads, count), POISON, device=device)
    score_chunks(q_BRHD, landmarks_BKND, chunks_B, excluded_BKO, scores)
    select_top(scores, chunks_B, group, chunks, out_BRKS, workspace)
    assert (out_BRKS.diff(dim=-1) > 0).all()
    score_BRKN = chunk_scores(q_BRHD.double(), landmarks_BKND.double(), chunks_B, excluded_BKO)
    marked_BRKN = mark_chunks(out_BRKS, chunks)[..., :chunks]
    worst_inside = score_BRKN.masked_fill(~marked_BRKN, torch.inf).amin(dim=-1)
    best_outside = score_BRKN.masked_fill(marked_BRKN, -torch.inf).amax(dim=-1)
    assert (worst_inside >= best_outside * (1 - SWAPPED)).all()


def test_chunks_that_do_not_exist_are_not_selected(device: str) -> None:
    keys_BRKN = random_keys(3, 2, 2, 90, device=device)
    chunks_B = torch.tensor([90, 41, 0], device=device)
    beyond_BN = torch.arange(90, device=device) >= chunks_B[:, None]
    reference_BRKS = top_chunks(keys_BRKN.masked_fill(beyond_BN[:, None, None], -torch.inf), 11)
    garbage_BRKN = keys_BRKN.masked_fill(beyond_BN[:, None, None], torch.nan)
    for segment in (0, 32):
        out_BRKS = torch.full((3, 2, 2, 11), POISON, device=device)
        select_top(as_scores(garbage_BRKN), chunks_B, 1, 90, out_BRKS, poisoned(12, 90, 11, segment, device))
        assert torch.equal(out_BRKS, reference_BRKS)


def test_refuses_what_it_cannot_do(device: str) -> None:
    keys_BRKN = random_keys(1, 1, 2, 64, device=device)
    out_BRKS = torch.empty(1, 1, 2, 8, dtype=torch.int64, device=device)
    chunks_B = torch.tensor([64], device=device)
    small = TopWorkspace.allocate(Ledger(device), 1, 64, 8, segment=16)
    with pytest.raises(ConfigError, match="workspace"):
        select_top(as_scores(keys_BRKN), chunks_B, 1, 64, out_BRKS, small)
    with pytest.raises(ConfigError, match="scores"):
        select_top(as_scores(keys_BRKN), chunks_B, 2, 64, out_BRKS, small)
    with pytest.raises(ConfigError, match="out"):
        select_top(as_scores(keys_BRKN), chunks_B, 1, 64, out_BRKS.int(), small)
    with pytest.raises(ConfigError, match="segment"):
        TopWorkspace.allocate(Ledger(device), 1, 64, 8, segment=24)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "count"), [((24, 2, 8, 16384), 256), ((1, 2, 8, 65536), 1024), ((1, 1, 1, 1_000_003), 1024)]
)
def test_large(shape: tuple[int, ...], count: int) -> None:
    keys_BRKN = random_keys(*shape, device="cuda")
    coarse_BRKN = (keys_BRKN * 4).round()  # with many ties
    assert torch.equal(selected(keys_BRKN, count), top_chunks(keys_BRKN, count))
    assert torch.equal(selected(coarse_BRKN, count), top_chunks(coarse_BRKN, count))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "group", "chunks"), [(24, 4, 16384), (1, 4, 16384), (3, 7, 16001)])
def test_large_with_scores(batch: int, group: int, chunks: int) -> None:
    assert_selects(
        batch=batch, rows=2, group=group, head_dim=128, chunks=chunks, count=256, segment=0, device="cuda"
    )  # fmt: skip


@pytest.mark.gpu
def test_captured_in_a_graph_follows_new_keys() -> None:
    keys_BRKN = random_keys(2, 2, 4, 5000, device="cuda")
    scores, chunks_B = as_scores(keys_BRKN), torch.full((2,), 5000, device="cuda")
    workspace = poisoned(16, 5000, 100, 1024, "cuda")
    out_BRKS = torch.full((2, 2, 4, 100), POISON, device="cuda")
    arguments = (scores, chunks_B, 1, 5000, out_BRKS, workspace)
    select_top(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_top(*arguments)
    new_BRKN = random_keys(2, 2, 4, 5000, device="cuda", seed=1)
    scores.logits.copy_(as_scores(new_BRKN).logits)
    graph.replay()
    assert torch.equal(out_BRKS, top_chunks(new_BRKN, 100))
