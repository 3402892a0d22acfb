"""The cache simulator against lists kept in order of use, one head at a time."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.harness.cache_simulation import ChunkCache, Shares, last_set_shares, lru_shares, optimal_shares


class ListCache:
    """Chunks from the least to the most recently used."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.chunks = capacity, []

    def touch(self, wanted: list[int]) -> int:
        wanted = [chunk for chunk in wanted if chunk >= 0]
        missing = sum(chunk not in self.chunks for chunk in wanted)
        self.chunks = [chunk for chunk in self.chunks if chunk not in wanted] + wanted
        self.chunks = self.chunks[max(0, len(self.chunks) - self.capacity) :]
        return missing


@st.composite
def traces(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """True and predicted sets ``[T, H, S]`` with empty places, the number of chunks, a capacity."""
    size = draw(st.integers(1, 5))
    chunks = draw(st.integers(size, 12))
    shape = (draw(st.integers(2, 7)), draw(st.integers(1, 3)), size)
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    both = [random.permuted(np.broadcast_to(np.arange(chunks), (*shape[:2], chunks)), axis=2) for _ in range(2)]
    sets = [np.where(random.random(shape) < 0.1, -1, order[..., :size]) for order in both]
    return sets[0], sets[1], chunks, draw(st.integers(size, chunks + 2))


@settings(max_examples=200)
@given(traces())
def test_a_cache_is_a_list_in_order_of_use(trace) -> None:
    true_THS, _, chunks, capacity = trace
    heads = true_THS.shape[1]
    cache, lists = ChunkCache(heads, chunks, capacity), [ListCache(capacity) for _ in range(heads)]
    for true_HS in true_THS:
        expected = sum(one.touch(wanted) for one, wanted in zip(lists, true_HS.tolist(), strict=True))
        assert cache.touch(true_HS) == expected
        for held_N, one in zip(cache.held(), lists, strict=True):
            assert set(np.flatnonzero(held_N).tolist()) == set(one.chunks)


@settings(max_examples=100)
@given(traces())
def test_shares_are_those_of_lists(trace) -> None:
    true_THS, predicted_THS, chunks, capacity = trace
    misses = prefetched = 0
    for h in range(true_THS.shape[1]):
        one = ListCache(capacity)
        for t, (true_S, predicted_S) in enumerate(
            zip(true_THS[:, h].tolist(), predicted_THS[:, h].tolist(), strict=True)
        ):
            missing = one.touch(true_S)
            misses += missing if t else 0
            prefetched += one.touch(predicted_S) if t + 1 < len(true_THS) else 0
    selected = int((true_THS[1:] >= 0).sum())
    if selected:
        expected = Shares(misses / selected, prefetched / selected)
        assert lru_shares(true_THS, chunks, capacity, predicted_THS) == expected


def full_sets(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    order = np.broadcast_to(np.arange(20), (9, 3, 20))
    true, predicted = (random.permuted(order, axis=2)[..., :6] for _ in range(2))
    return true, predicted


@pytest.mark.parametrize("seed", range(5))
def test_a_cache_as_large_as_the_set_holds_the_last_set(seed: int) -> None:
    """So the simulator, the share reused and the share predicted are three ways to the same number."""
    true, predicted = full_sets(seed)
    assert lru_shares(true, 20, 6) == last_set_shares(true)
    assert lru_shares(true, 20, 6, predicted) == last_set_shares(true, predicted)
    assert last_set_shares(true).prefetched == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_larger_cache_never_misses_more_and_one_for_all_chunks_misses_new_ones_only(seed: int) -> None:
    true, _ = full_sets(seed)
    misses = [lru_shares(true, 20, capacity).misses for capacity in range(6, 21)]
    assert misses == sorted(misses, reverse=True)
    new = sum(
        chunk not in true[:t, h] for t in range(1, len(true)) for h in range(true.shape[1]) for chunk in true[t, h]
    )
    assert misses[-1] == new / true[1:].size


def test_a_perfect_prediction_leaves_no_miss() -> None:
    true, _ = full_sets(0)
    following = np.concatenate((true[1:], true[:1]))
    for capacity in (6, 9, 20):
        shares = lru_shares(true, 20, capacity, following)
        assert shares.misses == 0
        # What would have been missed is fetched all the same, only ahead.
        assert shares.prefetched == lru_shares(true, 20, capacity).misses


def fewest_misses(sets: list[list[int]], capacity: int) -> int:
    """Of all ways to choose what stays after each step, the one with the fewest misses from the second step on."""
    best = {frozenset(): 0}
    for t, wanted in enumerate(sets):
        real = {chunk for chunk in wanted if chunk >= 0}
        reached: dict[frozenset[int], int] = {}
        for held, misses in best.items():
            now, cost = held | real, misses + (len(real - held) if t else 0)
            for kept in combinations(sorted(now), min(capacity, len(now))):
                key = frozenset(kept)
                reached[key] = min(cost, reached.get(key, cost))
        best = reached
    return min(best.values())


@settings(max_examples=60)
@given(traces())
def test_the_optimum_is_that_of_all_choices(trace) -> None:
    true_THS, _, chunks, capacity = trace
    selected = int((true_THS[1:] >= 0).sum())
    if selected:
        by_head = [fewest_misses(true_THS[:, h].tolist(), capacity) for h in range(true_THS.shape[1])]
        assert optimal_shares(true_THS, chunks, capacity) == Shares(sum(by_head) / selected, 0)
        assert optimal_shares(true_THS, chunks, capacity).misses <= lru_shares(true_THS, chunks, capacity).misses
