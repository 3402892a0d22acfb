"""Lists of records to fetch, made on the device by one kernel and walked by another.

A list is compact: its length is counted on the device, and its order between heads is not defined. A list that a stream
still reads must not be written on another, so transfers that may be under way at the same time have lists of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.ledger import Ledger


@dataclass
class FetchList:
    """Records to bring to the device.

    entries: int32 ``[3, capacity]``, rows are head (``b * K + k``), chunk and slot. count: int32 ``[1]``, how many.
    """

    entries: Tensor
    count: Tensor

    @classmethod
    def allocate(cls, ledger: Ledger, capacity: int) -> FetchList:
        """An empty list of at most ``capacity`` records (B * K * S), booked under ``workspace``."""
        return cls.for_layers(ledger, 1, capacity)[1][0]

    @classmethod
    def for_layers(cls, ledger: Ledger, layers: int, capacity: int) -> tuple[Tensor, list[FetchList]]:
        """An empty list for each layer, so that all may be under way at once, and their counters, int32 ``[layers]``.

        One launch zeroes all counters. Booked under ``workspace``.
        """
        counters = ledger.on_device("workspace", (layers,), torch.int32)
        entries = [ledger.on_device("workspace", (3, capacity), torch.int32) for _ in range(layers)]
        return counters, [cls(*both) for both in zip(entries, counters.split(1), strict=True)]
