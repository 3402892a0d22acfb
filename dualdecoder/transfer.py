"""Side streams on which chunks cross the link while the compute stream goes on (paper section 5.3).

On a CPU there are no streams: everything happens at once and in program order, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream beside the compute stream. ``key`` tells apart pieces of work that are awaited separately.

    All waiting is between streams on the device, so it can be captured in a CUDA graph.
    """

    def __init__(self, device: torch.device, urgent: bool) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._done: dict[int, torch.cuda.Event] = {}
        if device.type == "cuda":
            # CUDA's scale: a lower number goes first. 0 is the lowest priority.
            self.stream = torch.cuda.Stream(device, priority=-5 if urgent else 0)

    @contextmanager
    def work(self, key: int = 0) -> Iterator[None]:
        """Issue the body's kernels on this stream, after all that the compute stream has been given so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
            self._done[key] = self.stream.record_event()

    def wait(self, key: int = 0) -> None:
        """Make the current stream wait for the last piece of work with this key, if it was not waited for yet."""
        event = self._done.pop(key, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Wait for all pieces. A capture must end with it, and may not wait for what was issued before it."""
        for key in list(self._done):
            self.wait(key)

    def keep_alive(self, tensor: Tensor) -> None:
        """Tell the allocator that this stream still reads ``tensor`` when its last reference is gone."""
        if self.stream is not None:
            tensor.record_stream(self.stream)
