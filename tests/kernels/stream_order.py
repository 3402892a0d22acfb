"""Which accesses to memory nothing orders, found on a CPU: side streams that exist as clocks only.

A method made with ``planned_for="cuda"`` runs its kernels in Triton's interpreter, in program order. Meanwhile every
stream has a vector clock, which waits advance as they would on a GPU, and every byte remembers who wrote and read it
last. Two accesses, one of them a write, that no chain of waits orders are a race, whether or not they would ever meet.
As on a GPU, a freed tensor's memory may be used again by the stream that it was allocated on, and by no other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from dualdecoder.transfer import SideStream

MOST_STREAMS = 8


class Stream:
    """What ``SideStream`` needs of a CUDA stream. ``clock[s]``: the last operation of stream s that is done by now."""

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name, self.clock = number, name, np.zeros(MOST_STREAMS, dtype=np.int32)

    def record_event(self) -> np.ndarray:
        return self.clock.copy()

    def wait_event(self, event: np.ndarray) -> None:
        np.maximum(self.clock, event, out=self.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.clock)


class Block:
    """The memory of one storage, which is held, so that no other gets its addresses."""

    def __init__(self, storage: torch.UntypedStorage, allocated_on: int | None) -> None:
        self.storage, self.allocated_on = storage, allocated_on
        self.begin, size = storage.data_ptr(), storage.nbytes()
        # Byte by byte: who wrote last and in which of its operations, and the last operation of each stream that read.
        self.writer, self.written = np.zeros(size, np.int8), np.zeros(size, np.int32)
        self.read = np.zeros((MOST_STREAMS, size), np.int32)
        self.kept_for: set[int] = set()

    @property
    def is_free(self) -> bool:
        """Nobody but this block refers to the storage any more."""
        return torch._C._storage_Use_Count(self.storage._cdata) == 1

    def later_than(self, clock: np.ndarray, at: Any, writes: bool) -> set[tuple[int, int]]:
        """Operations (stream, number) on these bytes that are not done at that time; of reads only if it ``writes``."""
        writer, written = self.writer[at], self.written[at]
        late = written > clock[writer]
        found = set(zip(writer[late].tolist(), written[late].tolist(), strict=True))
        for stream, read in enumerate(self.read[:, at]) if writes else ():
            found |= {(stream, number) for number in np.unique(read[read > clock[stream]]).tolist()}
        return found

    def note(self, stream: Stream, at: Any, writes: bool) -> None:
        if writes:
            self.writer[at], self.written[at] = stream.number, stream.clock[stream.number]
        else:
            self.read[stream.number, at] = stream.clock[stream.number]


def bytes_of(tensor: Tensor) -> Any:
    """Which bytes of its storage a tensor covers: a slice or an array."""
    first = tensor.storage_offset() * tensor.itemsize
    if tensor.is_contiguous():
        return slice(first, first + tensor.nbytes)
    at = np.zeros((), dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + np.arange(size) * stride
    return first + (at.reshape(-1, 1) * tensor.itemsize + np.arange(tensor.itemsize)).ravel()


class StreamOrder(TorchDispatchMode):
    """Within ``watched_streams``: follows all operations and gathers ``races``, as sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = [Stream(0, "compute")]
        self.compute = self.current = self.streams[0]
        self.sides: list[SideStream] = []
        self.blocks: dict[int, Block] = {}
        self.temporary: set[int] = set()
        self.freed: dict[int, list[Block]] = defaultdict(list)
        self.names: dict[tuple[int, int], str] = {}
        self.races: set[str] = set()
        # Addresses that the kernel under way has loaded (False) and stored (True); None outside of kernels.
        self.kernel: dict[bool, list[np.ndarray]] | None = None

    def add(self, side: SideStream) -> None:
        """Give a side stream a clock."""
        side.stream = Stream(len(self.streams), f"side stream {len(self.streams)}")
        self.streams.append(side.stream)
        self.sides.append(side)
        assert len(self.streams) <= MOST_STREAMS

    def end_of_step(self) -> None:
        """What a capture of the step would refuse is a race with the next step, too."""
        for side in self.sides:
            number = side.stream.number
            if side._done or side.stream.clock[number] > self.compute.clock[number]:
                self.races.add(f"{side.stream.name}: the step ends without a wait for it")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.kernel is not None:
            return func(*args, **kwargs)
        self._notice_freed()
        result = func(*args, **kwargs)
        known = [self._known(t) for t in _tensors(result)]
        # What is called a view may have had to copy, and what is no view may give back its argument.
        if not func.is_view or not all(known):
            self._operation(func, args, kwargs, result)
        return result

    def _operation(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        self._tick(str(func))
        for given, argument in _by_schema(func, args, kwargs):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given):
                self._access(self._block(tensor), bytes_of(tensor), writes)
        for tensor in _tensors(result):
            if not self._known(tensor):
                self._reuse_freed()
                block = self._block(tensor, self.current.number)
                self._access(block, slice(None), True)

    def _tick(self, name: str) -> None:
        self.current.clock[self.current.number] += 1
        self.names[self.current.number, int(self.current.clock[self.current.number])] = name

    def _known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.blocks or not tensor.untyped_storage().nbytes()

    def _block(self, tensor: Tensor, allocated_on: int | None = None) -> Block:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.blocks:
            self.blocks[storage.data_ptr()] = Block(storage, allocated_on)
            if allocated_on is not None:
                self.temporary.add(storage.data_ptr())
        return self.blocks[storage.data_ptr()]

    def _access(self, block: Block, at: Any, writes: bool) -> None:
        for other in block.later_than(self.current.clock, at, writes):
            self._report("writes what" if writes else "reads what", other)
        block.note(self.current, at, writes)

    def _report(self, what: str, other: tuple[int, int]) -> None:
        here = (self.current.number, int(self.current.clock[self.current.number]))
        one, another = (f"{self.names[key]} on {self.streams[key[0]].name}" for key in (here, other))
        self.races.add(f"{one} {what} {another} may still use")

    def _notice_freed(self) -> None:
        for begin in [begin for begin in self.temporary if self.blocks[begin].is_free]:
            self.temporary.remove(begin)
            self.freed[self.blocks[begin].allocated_on].append(self.blocks[begin])

    def _reuse_freed(self) -> None:
        """The current stream allocates: it may be given any memory of its own that was freed."""
        for block in self.freed.pop(self.current.number, []):
            for other in block.later_than(self.current.clock, slice(None), writes=True):
                if other[0] not in block.kept_for:
                    self._report("is given memory that", other)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Stands for ``Tensor.record_stream``."""
        self._block(tensor).kept_for.add(stream.number)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Stands for ``torch.cuda.stream``."""
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def launch(self, name: str, arguments: Any) -> Iterator[None]:
        """Around a kernel: its addresses are one operation."""
        self._notice_freed()
        for tensor in _tensors(arguments):
            self._block(tensor)
        self.kernel = {False: [], True: []}
        yield
        self._tick(name)
        addresses, self.kernel = self.kernel, None
        begins = sorted(self.blocks)
        for writes, parts in addresses.items():
            for begin, at in _by_block(begins, np.unique(np.concatenate(parts))) if parts else ():
                self._access(self.blocks[begin], at, writes)

    def touch(self, pointers: Any, mask: Any, itemsize: int, writes: bool) -> None:
        """A kernel's load or store."""
        if self.kernel is not None:
            address = np.broadcast_to(pointers, np.shape(mask))[np.asarray(mask, bool)].astype(np.int64)
            self.kernel[writes].append((address[:, None] + np.arange(itemsize)).ravel())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _by_schema(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        yield args[number] if number < len(args) else kwargs.get(argument.name), argument


def _by_block(begins: list[int], addresses: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Sorted addresses, as places in the blocks that begin there."""
    while len(addresses):
        number = bisect_right(begins, int(addresses[0])) - 1
        end = begins[number + 1] if number + 1 < len(begins) else np.iinfo(np.int64).max
        here = int(np.searchsorted(addresses, end))
        yield begins[number], addresses[:here] - begins[number]
        addresses = addresses[here:]


@contextmanager
def watched_streams() -> Iterator[StreamOrder]:
    """Side streams made in here are clocks; everything done in here is followed."""
    with pytest.MonkeyPatch.context() as patch, StreamOrder() as order:
        _replace_streams(patch, order)
        _replace_interpreter(patch, order)
        yield order


def _replace_streams(patch: pytest.MonkeyPatch, order: StreamOrder) -> None:
    make = SideStream.__init__

    def make_with_clock(side: SideStream, device: torch.device, urgent: bool) -> None:
        make(side, device, urgent)
        order.add(side)

    patch.setattr(SideStream, "__init__", make_with_clock)
    patch.setattr(torch.cuda, "current_stream", lambda: order.current)
    patch.setattr(torch.cuda, "stream", order.use)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: order.keep(tensor, stream))


def _replace_interpreter(patch: pytest.MonkeyPatch, order: StreamOrder) -> None:
    builder, call = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__

    def launch(grid: Any, *arguments: Any, **options: Any) -> None:
        with order.launch(grid.fn.__name__, (arguments, options)):
            call(grid, *arguments, **options)

    patch.setattr(interpreter.GridExecutor, "__call__", launch)
    # Where the pointers and the mask are among the arguments, and whether memory is read (False) and written (True).
    for name, pointers_at, mask_at, accesses in (
        ("create_masked_load", 0, 1, (False,)),
        ("create_masked_store", 0, 2, (True,)),
        ("create_atomic_rmw", 1, 3, (False, True)),
    ):
        patch.setattr(builder, name, _touching(getattr(builder, name), pointers_at, mask_at, accesses, order))


def _touching(original: Any, pointers_at: int, mask_at: int, accesses: tuple[bool, ...], order: StreamOrder) -> Any:
    """The interpreter's function, which also tells ``order`` what it loads or stores."""

    def touching(builder: Any, *arguments: Any) -> Any:
        pointers, mask = arguments[pointers_at], arguments[mask_at]
        itemsize = max(8, pointers.get_element_ty().primitive_bitwidth) // 8
        for writes in accesses:
            order.touch(pointers.data, mask.data, itemsize, writes)
        return original(builder, *arguments)

    return touching
