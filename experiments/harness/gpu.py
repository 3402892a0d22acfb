"""Timing on a GPU, and the two rates that every floor is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from dualdecoder.dual import DualDecoder
from dualdecoder.errors import CapacityError, require
from dualdecoder.pinned import PinnedMemory, peak_pinned_bytes

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """Measured bytes per second. ``copy``: device to device, read plus written. ``link``: pinned host to device."""

    copy: float
    link: float


def require_gpu() -> None:
    """Raise ConfigError without a GPU."""
    require(torch.cuda.is_available(), "hardware", "no GPU", "a machine with an NVIDIA GPU")


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


def gather_rate(method: DualDecoder) -> float:
    """Bytes per second of the method's own gather, alone, over a full buffer of random chunks."""
    buffer, chunks = method.buffers[0], method.layers[0].landmarks_BKND.shape[2]
    order_BKN = torch.rand((*buffer.held_BKS.shape[:2], chunks), device="cuda").argsort(dim=-1)
    method.ops.begin_step(method.chunks_B)
    fetch = method.ops.replace(buffer, order_BKN[..., : method.slots].sort(dim=-1).values)
    ms = median_ms(lambda: method.ops.fetch(method.host, 0, fetch, buffer))
    buffer.clear()
    return buffer.records_BKSXCD.nbytes / ms * 1e3


def gpu_after_measuring() -> dict[str, float | None]:
    """Peak device and page-locked bytes of this process, and the rates of plain copies on the warm GPU.

    The rates are None where memory is short.
    """
    peaks = {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_pinned_bytes": peak_pinned_bytes()}
    torch.cuda.empty_cache()
    try:
        rates = measured_rates()
    except (torch.cuda.OutOfMemoryError, CapacityError):
        return {**peaks, "copy_bytes_per_s": None, "link_bytes_per_s": None}
    return {**peaks, "copy_bytes_per_s": rates.copy, "link_bytes_per_s": rates.link}
