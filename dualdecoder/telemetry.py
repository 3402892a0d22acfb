"""Counters on the device, per layer: what was selected, found, fetched, predicted. The host reads them afterwards."""

from __future__ import annotations

import math

import torch

from dualdecoder.ledger import Ledger

# selected: chunks in the true set. hit: of those, in the buffer when needed. urgent: fetched on demand.
# prefetched: fetched ahead, counted when the layer comes to use them. predicted: of the true set, in the prediction
# made one step before. reused: of the true set, in the true set of the step before. comparable: selected chunks in
# steps that have a step before them.
FIELDS = ("selected", "hit", "urgent", "prefetched", "predicted", "reused", "comparable")


class Telemetry:
    """Sums of chunk counts, ``[layers, fields]`` int64; ``ops.count_selection`` says how they grow."""

    def __init__(self, layers: int, ledger: Ledger) -> None:
        self.counts = ledger.on_device("tables", (layers, len(FIELDS)), torch.int64)

    def per_layer(self) -> list[dict[str, int]]:
        """Counts by layer and field, on the host."""
        return [dict(zip(FIELDS, row, strict=True)) for row in self.counts.tolist()]

    def totals(self) -> dict[str, int]:
        """Counts summed over layers, on the host."""
        return dict(zip(FIELDS, self.counts.sum(dim=0).tolist(), strict=True))


def share(part: int, whole: int) -> float:
    """``part / whole``, NaN of nothing."""
    return part / whole if whole else math.nan
