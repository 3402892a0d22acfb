"""What share of its true set a method attends to: whether a speed was reached with equal work.

A unit (a chunk, a block or a token) belongs to the true set of a step, layer and KV head if the method's own scoring,
asked with the real row's query in that layer, picks it within the method's budget; where a seeded process decides the
selection, its true set counts. The share is the number of those units whose keys and values the attention had at hand,
by number of units over all layers that select, sequences, KV heads and observed steps. What is lost is thus lost to a
guess, a cap or a late transfer; how well a method's scoring finds what matters is a question of quality, not of work.
Layers that attend to everything, and tokens that always are attended to, do not count: they would flatter.
A method that attends to every token has a share of 1. Of one that evicts, the true set cannot be known, for its scores
need keys that are gone; nor of one that does not say what it attends to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualdecoder.landmarks import NO_CHUNK, count_common
from dualdecoder.method import KVMethod

# Steps that are observed, beside all others and never timed.
OBSERVED_STEPS = 4
# The experiments whose rows are speeds of methods.
SPEEDS = ("method_time", "step_time", "throughput")
# A speed with a smaller share is one of less work.
EQUAL_WORK = 0.99


@dataclass(frozen=True)
class AttendedShare:
    """``share`` from 0 to 1, or None where it cannot be known; ``basis`` says from what it is known, or why not."""

    share: float | None
    basis: str

    def columns(self) -> dict[str, Any]:
        """The two columns that every row of a speed table has."""
        return {"attended_share": self.share, "attended_share_basis": self.basis}


NO_TRANSFERS = AttendedShare(None, "unknown: nothing was transferred")


def attended_share(method: KVMethod, step: Callable[[], object]) -> AttendedShare:
    """The share of ``method`` in the next ``OBSERVED_STEPS`` calls of ``step``, each a full step that runs eagerly.

    To be called after the timed steps: the method's tables are then those that the timed steps worked with. No step is
    taken where there is nothing to observe.
    """
    can = method.capabilities
    if can.exact or can.dense:
        return AttendedShare(1.0, "attends to every token" + ("" if can.exact else ", not to all of them exactly"))
    if not can.recalls:
        return AttendedShare(None, "unknown: evicted tokens have no scores")
    if not method.transfers:
        return NO_TRANSFERS
    counts = _Counts(method)
    method.observe = counts
    try:
        for _ in range(OBSERVED_STEPS):
            step()
    finally:
        method.observe = None
    return counts.share()


def is_equal_work(share: float | None) -> bool:
    """Whether a speed may be compared with that of a method that attends to all of its true set."""
    return share is not None and share >= EQUAL_WORK


def known_share(row: dict[str, Any]) -> float | None:
    """The share of its true set that a row of a speed table attended to; None where it is not known.

    Older records do not have it; only for a method with exact attention it is known without.
    """
    share = row.get("attended_share")
    # Of a table's row, an empty cell is NaN.
    if share is not None and not math.isnan(share):
        return share
    can = row.get("capabilities")
    return 1.0 if isinstance(can, dict) and can.get("exact") else None


class _Counts:
    """Units of the true sets, and those of them that were at hand, counted on the method's device."""

    def __init__(self, method: KVMethod) -> None:
        self.most_units = method.context
        self.counts_2 = torch.zeros(2, dtype=torch.int64, device=method.ledger.device)
        self.calls = 0

    def __call__(self, layer: int, true_BKS: Tensor, at_hand_BKS: Tensor) -> None:
        common_BK = count_common(at_hand_BKS, true_BKS, self.most_units)
        self.counts_2 += torch.stack((common_BK.sum(), (true_BKS != NO_CHUNK).sum()))
        self.calls += 1

    def share(self) -> AttendedShare:
        if not self.calls:
            return AttendedShare(None, "unknown: the method does not say what it attends to")
        attended, wanted = self.counts_2.tolist()
        if not wanted:
            return AttendedShare(1.0, "nothing to choose from: every token is attended to")
        return AttendedShare(
            attended / wanted, f"{attended:.0f} of {wanted:.0f} units in {OBSERVED_STEPS} untimed steps"
        )
