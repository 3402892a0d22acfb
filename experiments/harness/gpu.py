"""Timing on a GPU, and the two rates that every floor is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from dualdecoder.errors import CapacityError
from dualdecoder.method import KVMethod
from dualdecoder.pinned import PinnedMemory, peak_pinned_bytes

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """Measured bytes per second. ``copy``: device to device, read plus written. ``link``: pinned host to device."""

    copy: float
    link: float


def median_ms(call: Callable[[], object]) -> float:
    """Median time of one call, replayed from a CUDA graph so that the host's launches do not count.

    What the call reads should be larger than the L2 cache (50 MB on an H200), or it is measured warm.
    """
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(call, rep=60, return_mode="median")


@cache
def measured_rates() -> Rates:
    """Rates of plain copies of 1 GiB on this machine, measured once a process by CUDA events."""
    from triton.testing import do_bench

    def rate(moved: int, call: Callable[[], object]) -> float:
        return moved / do_bench(call, warmup=20, rep=80, return_mode="median") * 1e3

    source, target = (torch.empty(GIB, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    host = PinnedMemory(GIB).tensor((GIB,), torch.uint8)
    return Rates(
        copy=rate(2 * GIB, lambda: target.copy_(source)),
        link=rate(GIB, lambda: target.copy_(host, non_blocking=True)),
    )


@cache
def gather_rate(record_bytes: int) -> float:
    """Bytes per second of the gather kernel alone: random records of this size (a multiple of 8), 256 MiB in all."""
    from dualdecoder.kernels.fetch_list import FetchList
    from dualdecoder.kernels.gather import gather_records

    record, count = (2, 1, record_bytes // 8), GIB // 4 // record_bytes
    host = PinnedMemory(GIB).tensor((1, 1, GIB // record_bytes, *record), torch.int32)
    buffer = torch.empty((1, 1, count, *record), dtype=torch.int32, device="cuda")
    chosen, slot = (torch.randperm(n, device="cuda")[:count].int() for n in (host.shape[2], count))
    fetch = FetchList(torch.stack((torch.zeros_like(slot), chosen, slot)), torch.full_like(slot[:1], count))
    return buffer.nbytes / median_ms(lambda: gather_records(host, buffer, fetch)) * 1e3


@dataclass(frozen=True)
class LinkRate:
    """What a method's link floor is made of: bytes per second, and of which kind of transfer."""

    rate: float
    kind: str


def link_rate(method: KVMethod) -> LinkRate:
    """The rate of a gather of records as large as the method's; of a plain copy, which bounds any, if it makes such."""
    record_bytes = getattr(getattr(method, "host", None), "record_bytes", None)
    if method.copies_layers or record_bytes is None:
        return LinkRate(measured_rates().link, "plain copy")
    return LinkRate(gather_rate(record_bytes), f"gather of {record_bytes}-byte records")


def gpu_after_measuring() -> dict[str, float | None]:
    """Peak device and page-locked bytes of this process, and the rates of plain copies on the warm GPU.

    The rates are None where memory is short.
    """
    peaks = {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_pinned_bytes": peak_pinned_bytes()}
    # The next point of this process, if there is one, has its own.
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    try:
        rates = measured_rates()
    except (torch.cuda.OutOfMemoryError, CapacityError):
        return {**peaks, "copy_bytes_per_s": None, "link_bytes_per_s": None}
    return {**peaks, "copy_bytes_per_s": rates.copy, "link_bytes_per_s": rates.link}
