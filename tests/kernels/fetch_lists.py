"""Fetch lists made by hand."""

import torch

from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.ledger import Ledger


def fetch_list(entries: list[tuple[int, int, int]], device: str) -> FetchList:
    """A list of (head, chunk, slot) with room beyond its end, filled with entries that would lead far outside."""
    fetch = FetchList.allocate(Ledger(device), len(entries) + 5)
    fetch.entries.fill_(1 << 30)
    if entries:
        fetch.entries[:, : len(entries)] = torch.tensor(entries, dtype=torch.int32).T
    fetch.count.fill_(len(entries))
    return fetch
