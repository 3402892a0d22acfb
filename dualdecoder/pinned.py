"""Page-locked host memory for the full KV: one block that GPU kernels read directly over the link.

torch's own pinned allocator rounds a block up to a power of two, which at 100 GiB does not fit. Here a plain anonymous
mapping in huge pages is registered with CUDA, in pieces, so that touching the pages of one piece overlaps with locking
another (the driver takes a global lock for the latter).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import psutil
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from dualdecoder.errors import CapacityError, require

# Bytes of host memory that may be used, where the machine's own figure is wrong: some virtual machines grow with use.
HOST_BYTES_VARIABLE = "DUALDECODER_HOST_BYTES"
PAGE = 4096
PIECE = 1 << 30
PROGRESS_FROM = 4 << 30
MAX_THREADS = 8
# cudaHostRegisterPortable | cudaHostRegisterMapped: for every context, and readable by kernels.
REGISTER_FLAGS = 1 | 2


class _Meter:
    """Bytes of this process that are page-locked now, by address, and the most there have been."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[int, int] = {}
        self.peak = 0

    def add(self, address: int, nbytes: int) -> None:
        with self._guard:
            self._held[address] = nbytes
            self.peak = max(self.peak, sum(self._held.values()))

    def remove(self, address: int) -> None:
        with self._guard:
            self._held.pop(address, None)


_METER = _Meter()


def peak_pinned_bytes() -> int:
    """The most bytes that were page-locked at once since this process started."""
    return _METER.peak


class Registrar(Protocol):
    """Locks and unlocks ranges of host memory."""

    def register(self, address: int, nbytes: int) -> None: ...

    def unregister(self, address: int) -> None: ...


class CudaRegistrar:
    """Locks pages for CUDA devices; kernels may then use the CPU address."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._cudart = torch.cuda.cudart()
        self._device = torch.cuda.current_device()

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):  # a new thread starts on device 0
            error = int(self._cudart.cudaHostRegister(address, nbytes, REGISTER_FLAGS))
        if error:
            raise CapacityError(f"host memory: CUDA could not page-lock {nbytes:,} bytes (cudaError {error})")

    def unregister(self, address: int) -> None:
        error = int(self._cudart.cudaHostUnregister(address))
        if error:
            raise RuntimeError(f"cudaHostUnregister failed (cudaError {error})")


class NoRegistrar:
    """Locks nothing: for machines without a CUDA device."""

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass


class _Pages(mmap.mmap):
    """A class of our own, because its weak references are called before the memory is unmapped."""


class PinnedMemory:
    """One page-locked block, handed out as tensors at increasing page-aligned offsets.

    The block stays locked until ``close()``, or until this object and every tensor of it are gone, or until the
    interpreter exits. Tensors stay valid CPU memory after ``close()``, but no kernel may touch them any more.
    """

    def __init__(self, nbytes: int, *, piece: int = PIECE, registrar: Registrar | None = None) -> None:
        """Allocate and lock ``nbytes``. ``registrar`` defaults to CUDA if there is a device, else locks nothing.

        ``piece`` is rounded up to whole pages. A CUDA copy should not cross from one registered piece into the
        next: give the size of a layer, and each layer's tensor is one piece (kernels may cross).
        Raises ``CapacityError`` naming the bytes needed and available, before anything is allocated.
        """
        require(nbytes >= 1, "host memory bytes", nbytes, "a positive number")
        require(piece >= 1, "piece", piece, "a positive number of bytes")
        self.nbytes = whole_pages(nbytes)
        _require_available(self.nbytes)
        pages = _map_pages(self.nbytes)
        self._block: Tensor | None = torch.frombuffer(pages, dtype=torch.uint8)
        self._offset = 0
        registrar = registrar or (CudaRegistrar() if torch.cuda.is_available() else NoRegistrar())
        registered: list[int] = []
        # Tied to the pages and not to this object: a tensor may outlive it.
        self._unlock = weakref.finalize(pages, _unregister_all, registrar, registered)
        try:
            _lock(self._block, whole_pages(piece), registrar, registered)
        except BaseException:
            self.close()
            raise

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor of the block, zeroed. Raises ``CapacityError`` if it does not fit into what is left."""
        require(self._block is not None, "host memory", "closed", "an open block")
        start, nbytes = self._offset, math.prod(shape) * dtype.itemsize
        left = self.nbytes - start
        if nbytes > left:
            raise CapacityError(f"host memory: {nbytes:,} bytes needed, {left:,} of {self.nbytes:,} left in the block")
        self._offset += whole_pages(nbytes)
        return self._block[start : start + nbytes].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Unlock the block. Its memory goes back to the system with the last of its tensors."""
        self._block = None
        self._unlock()

    def __enter__(self) -> PinnedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def available_host_bytes() -> int:
    """Bytes of host memory that may be taken: ``DUALDECODER_HOST_BYTES`` if set, else what the system reports."""
    override = os.environ.get(HOST_BYTES_VARIABLE)
    if override is None:
        return psutil.virtual_memory().available
    require(override.isdecimal(), HOST_BYTES_VARIABLE, override, "a whole number of bytes")
    return int(override)


def _require_available(nbytes: int) -> None:
    available = available_host_bytes()
    if nbytes > available:
        raise CapacityError(
            f"host memory: {nbytes:,} bytes needed, {available:,} available ({HOST_BYTES_VARIABLE} sets another figure)"
        )


def whole_pages(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes in a block."""
    return -(-nbytes // PAGE) * PAGE


def _map_pages(nbytes: int) -> _Pages:
    try:
        pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError(f"host memory: the system refused {nbytes:,} bytes ({error})") from error
    with contextlib.suppress(OSError, AttributeError):  # fewer faults and faster locking, but not everywhere
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _lock(block: Tensor, piece: int, registrar: Registrar, registered: list[int]) -> None:
    """Touch and register every piece; the addresses registered so far are in ``registered`` at any time."""

    def lock(part: Tensor) -> None:
        part[::PAGE].zero_()
        registrar.register(part.data_ptr(), part.nbytes)
        _METER.add(part.data_ptr(), part.nbytes)
        registered.append(part.data_ptr())

    parts = block.split(piece)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        locking = pool.map(lock, parts)
        try:
            for _ in _progress(locking, len(parts), block.nbytes):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _progress(locking: Iterable[None], pieces: int, nbytes: int) -> Iterable[None]:
    shown = nbytes >= PROGRESS_FROM
    return track(
        locking, "Page-locking host memory", pieces, console=Console(stderr=True), transient=True, disable=not shown
    )


def _unregister_all(registrar: Registrar, registered: list[int]) -> None:
    while registered:
        _METER.remove(registered[-1])
        registrar.unregister(registered.pop())
