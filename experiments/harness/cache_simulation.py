"""Misses of chunk caches on recorded selections: least recently used, with and without prefetching a prediction.

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
        place_HS = np.where(chunk_HS < 0, self.used_HN.shape[1] - 1, chunk_HS)
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
