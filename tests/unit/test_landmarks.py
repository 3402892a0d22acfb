"""Landmarks, outliers, scores and top-S against loops written from the definition."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from dualdecoder.landmarks import NO_CHUNK, chunk_landmarks, chunk_scores, count_common, outlier_chunks, top_chunks


def test_landmark_is_the_mean_key() -> None:
    k_KNCD = torch.randn(2, 5, 3, 4)
    expected = k_KNCD.numpy().mean(axis=2)
    assert_allclose(chunk_landmarks(k_KNCD).numpy(), expected, rtol=1e-6)


def test_outliers_have_the_lowest_minimum_cosine() -> None:
    k_KNCD = torch.randn(3, 9, 8, 16)
    got = outlier_chunks(k_KNCD, chunk_landmarks(k_KNCD), 4).tolist()
    for head, keys in enumerate(k_KNCD.double().numpy()):
        worst = []
        for chunk in keys:
            mean = chunk.mean(axis=0)
            worst.append(min(k @ mean / np.linalg.norm(k) / np.linalg.norm(mean) for k in chunk))
        assert got[head] == sorted(sorted(range(9), key=lambda n: worst[n])[:4])


def test_more_outliers_than_chunks_leave_empty_places() -> None:
    k_KNCD = torch.randn(1, 2, 4, 8)
    assert outlier_chunks(k_KNCD, chunk_landmarks(k_KNCD), 5)[0].tolist() == [0, 1, -1, -1, -1]


@given(
    rows=st.integers(1, 2),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    chunks=st.integers(1, 9),
    existing=st.integers(0, 9),
    seed=st.integers(0, 2**16),
)
def test_scores_match_a_loop(rows: int, heads: int, group: int, chunks: int, existing: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    existing = min(existing, chunks)
    q_BRHD = torch.randn(1, rows, heads * group, 4, generator=generator)
    landmarks_BKND = torch.randn(1, heads, chunks, 4, generator=generator)
    outlier = int(torch.randint(-1, chunks, (), generator=generator))
    excluded_BKO = torch.full((1, heads, 1), outlier)
    got = chunk_scores(q_BRHD, landmarks_BKND, torch.tensor([existing]), excluded_BKO)
    candidates = [n for n in range(existing) if n != outlier]
    for row in range(rows):
        for head in range(heads):
            expected = np.full(chunks, -math.inf)
            for g in range(group):
                q = q_BRHD[0, row, head * group + g].double().numpy()
                logits = np.array([q @ landmarks_BKND[0, head, n].double().numpy() / 2 for n in candidates])
                weights = np.exp(logits - logits.max()) if candidates else logits
                for n, weight in zip(candidates, weights / weights.sum() if candidates else [], strict=True):
                    expected[n] = max(expected[n], weight)
            assert_allclose(got[0, row, head].double().numpy(), expected, rtol=1e-4)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 14))
def test_top_breaks_ties_by_chunk_number(levels: list[int], count: int) -> None:
    """Level 0 stands for "not a candidate"."""
    scores = torch.tensor([float(level) if level else -math.inf for level in levels])
    candidates = sorted((n for n, level in enumerate(levels) if level), key=lambda n: (-levels[n], n))
    expected = (sorted(candidates[:count]) + [NO_CHUNK] * count)[:count]
    assert top_chunks(scores, count).tolist() == expected


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_common_counts_the_intersection(left: set[int], right: set[int]) -> None:
    def padded(chunks: set[int]) -> torch.Tensor:
        return torch.tensor([[[*chunks, *[NO_CHUNK] * (21 - len(chunks))]]])

    assert count_common(padded(left), padded(right), 21).item() == len(left & right)
