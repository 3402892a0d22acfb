"""Misses of chunk caches on recorded selections: least recently used, with and without prefetching, and the optimum.

A step asks for a whole set at once: what the cache holds of it are hits, what it lacks is fetched, then the cache drops
its least recently used chunks down to its capacity. Prefetching a prediction is the same without counting misses.
Every layer and KV head has a cache of its own. The first step fills the caches and is not counted.
Suffixes: T steps, H heads (layers times KV heads), S chunks of a set, N chunks of the context.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NEVER = -1


@dataclass(frozen=True)
class Shares:
    """Of all chunks selected: the share that was missing when needed, and how many were fetched ahead beside them."""

    misses: float
    prefetched: float


class ChunkCache:
    """One cache of ``capacity`` chunks a head; entries below 0 in a set are empty places."""

    def __init__(self, heads: int, chunks: int, capacity: int) -> None:
        self.capacity = capacity
        # When each chunk was used last, NEVER for those that are not held; the last column takes empty places.
        self.used_HN = np.full((heads, chunks + 1), NEVER, dtype=np.int64)
        self.clock = 0

    def touch(self, chunk_HS: np.ndarray) -> int:
        """Make the sets the most recently used, later entries more than earlier ones; returns how many were missing.

        A set may be at most as large as the capacity and may list no chunk twice.
        """
        assert chunk_HS.shape[1] <= self.capacity, "a set that does not fit"
        place_HS = _places(chunk_HS, self.used_HN.shape[1] - 1)
        missing = int(((np.take_along_axis(self.used_HN, place_HS, axis=1) == NEVER) & (chunk_HS >= 0)).sum())
        now_HS = np.broadcast_to(self.clock + np.arange(chunk_HS.shape[1]), chunk_HS.shape)
        np.put_along_axis(self.used_HN, place_HS, now_HS, axis=1)
        self.used_HN[:, -1] = NEVER
        self.clock += chunk_HS.shape[1]
        self._evict()
        return missing

    def held(self) -> np.ndarray:
        """Which chunks each head's cache holds, bool ``[H, N]``."""
        return self.used_HN[:, :-1] != NEVER

    def _evict(self) -> None:
        surplus = self.used_HN.shape[1] - self.capacity
        if surplus > 0:
            oldest_H1 = np.partition(self.used_HN, surplus, axis=1)[:, surplus : surplus + 1]
            self.used_HN[self.used_HN < oldest_H1] = NEVER


def _places(chunk_HS: np.ndarray, spare: int) -> np.ndarray:
    """Columns of the chunks; empty places go to a spare one."""
    return np.where(chunk_HS < 0, spare, chunk_HS)


def lru_shares(true_THS: np.ndarray, chunks: int, capacity: int, predicted_THS: np.ndarray | None = None) -> Shares:
    """A cache of ``capacity`` chunks a head; after step t, ``predicted_THS[t]`` is fetched for step t + 1 if given."""
    cache = ChunkCache(true_THS.shape[1], chunks, capacity)
    misses = prefetched = 0
    for step, true_HS in enumerate(true_THS):
        missing = cache.touch(true_HS)
        misses += missing if step else 0
        if predicted_THS is not None and step + 1 < len(true_THS):
            prefetched += cache.touch(predicted_THS[step])
    return _shares(true_THS, misses, prefetched)


def optimal_shares(true_THS: np.ndarray, chunks: int, capacity: int) -> Shares:
    """The fewest misses that any cache of that capacity without prefetch can have (Belady, 1966).

    It drops the chunks whose next use is farthest away, and so has to know all selections to come.
    """
    next_use_HN = np.full((true_THS.shape[1], chunks + 1), len(true_THS))
    following = [next_use_HN]
    for step in range(len(true_THS) - 1, 0, -1):
        next_use_HN = next_use_HN.copy()
        np.put_along_axis(next_use_HN, _places(true_THS[step], chunks), step, axis=1)
        following.append(next_use_HN)
    held_HN, misses = np.zeros(next_use_HN.shape, dtype=bool), 0
    for step, true_HS in enumerate(true_THS):
        place_HS = _places(true_HS, chunks)
        missing_HS = ~np.take_along_axis(held_HN, place_HS, axis=1) & (true_HS >= 0)
        misses += int(missing_HS.sum()) if step else 0
        np.put_along_axis(held_HN, place_HS, True, axis=1)
        # What is not held, and the column of empty places, is what is dropped first.
        held_HN[:, -1] = False
        order_HN = np.where(held_HN, following.pop(), len(true_THS) + 1).argsort(axis=1, kind="stable")
        np.put_along_axis(held_HN, order_HN[:, capacity:], False, axis=1)
    return _shares(true_THS, misses, 0)


def last_set_shares(true_THS: np.ndarray, predicted_THS: np.ndarray | None = None) -> Shares:
    """A buffer that holds the last step's set only, or what the last step predicted."""
    held_THS = true_THS if predicted_THS is None else predicted_THS
    misses, prefetched = _absent(true_THS[1:], held_THS[:-1]), _absent(held_THS[:-1], true_THS[:-1])
    return _shares(true_THS, misses, prefetched)


def _absent(wanted_THS: np.ndarray, held_THS: np.ndarray) -> int:
    """How many wanted chunks are not in the set of the same step and head."""
    return sum(
        int(((wanted_HS >= 0) & ~(wanted_HS[:, :, None] == held_HS[:, None, :]).any(-1)).sum())
        for wanted_HS, held_HS in zip(wanted_THS, held_THS, strict=True)
    )


def _shares(true_THS: np.ndarray, misses: int, prefetched: int) -> Shares:
    selected = int((true_THS[1:] >= 0).sum())
    return Shares(misses / selected, prefetched / selected)
