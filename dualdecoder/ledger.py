"""Every byte that a method holds, by category, on the device and on the host.

A method allocates only through a ``Ledger``. On the ``meta`` device the same calls count bytes without taking
memory: that is how ``plan()`` works, so a plan and an allocation cannot drift apart.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualdecoder.pinned import PinnedMemory, whole_pages


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by category. ``gpu`` is the memory of the compute device, ``host`` the memory of the machine."""

    gpu: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)

    @property
    def gpu_total(self) -> int:
        return sum(self.gpu.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    def with_gpu(self, **categories: int) -> MemoryPlan:
        """A copy with more device categories, put first."""
        return MemoryPlan({**categories, **self.gpu}, self.host)


class Ledger:
    """Allocates zeroed tensors and books them. ``device="meta"`` only books."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self._gpu: Counter[str] = Counter()
        self._host: Counter[str] = Counter()

    @property
    def planning(self) -> bool:
        """True if nothing is really allocated."""
        return self.device.type == "meta"

    def on_device(self, category: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor on the compute device, booked under ``category``."""
        tensor = torch.zeros(shape, dtype=dtype, device=self.device)
        self._gpu[category] += tensor.nbytes
        return tensor

    def on_host(self, category: str, tensors: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Zeroed tensors in host memory, page-locked if the compute device is a GPU; booked under ``category``."""
        if self.device.type == "cuda":
            made = _pinned(tensors, shape, dtype)
        else:
            made = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(tensors)]
        self._host[category] += sum(tensor.nbytes for tensor in made)
        return made

    def plan(self) -> MemoryPlan:
        """What has been booked so far."""
        return MemoryPlan(dict(self._gpu), dict(self._host))


def _pinned(tensors: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    # One block, locked tensor by tensor: a copy must not cross from one locked piece into the next.
    piece = whole_pages(math.prod(shape) * dtype.itemsize)
    memory = PinnedMemory(tensors * piece, piece=piece)
    return [memory.tensor(shape, dtype) for _ in range(tensors)]
