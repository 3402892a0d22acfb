"""Side streams on which chunks cross the link while the compute stream goes on (paper section 5.3).

On a CPU there are no streams: everything happens at once and in program order, with the same result.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream beside the compute stream. ``key`` tells apart pieces of work that are awaited separately.

    All waiting is between streams on the device, so it can be captured in a CUDA graph.
    """

    def __init__(self, device: torch.device, urgent: bool) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._done: dict[Hashable, torch.cuda.Event] = {}
        if device.type == "cuda":
            # CUDA's scale: a lower number goes first. 0 is the lowest priority.
            self.stream = torch.cuda.Stream(device, priority=-5 if urgent else 0)

    def follow(self) -> None:
        """Let this stream go on only after all that the current stream has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def work(self, key: Hashable = 0, follow: bool = True) -> Iterator[None]:
        """Issue the body's kernels on this stream; with ``follow``, behind what the current stream has been given."""
        if self.stream is None:
            yield
            return
        if follow:
            self.follow()
        with torch.cuda.stream(self.stream):
            yield
            self._done[key] = self.stream.record_event()

    def wait(self, key: Hashable = 0) -> None:
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
