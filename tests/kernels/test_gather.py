"""The zero-copy gather against plain indexing."""

import pytest
import torch
from fetch_lists import fetch_list
from torch import Tensor

from dualdecoder.kernels import slots
from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.kernels.gather import gather_records
from dualdecoder.ledger import Ledger
from dualdecoder.pinned import PinnedMemory


def host_records(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random records in memory that kernels can read. The tensor keeps its block alive and locked."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return PinnedMemory(numbers.nbytes, piece=1 << 20).tensor(shape, dtype).copy_(numbers)


def check(host: Tensor, batch: int, slots_: int, count: int, device: str, **knobs: int) -> None:
    """Copy ``count`` random records into random slots; all other slots keep their NaN."""
    sequences, heads, chunks = host.shape[:3]
    generator = torch.Generator().manual_seed(1)
    places = torch.randperm(batch * heads * slots_, generator=generator)[:count].tolist()
    chunk = torch.randint(chunks, (count,), generator=generator).tolist()
    entries = [(p // slots_, c, p % slots_) for p, c in zip(places, chunk, strict=True)]
    buffer = torch.full((batch, heads, slots_, *host.shape[3:]), torch.nan, dtype=host.dtype, device=device)
    wanted = buffer.cpu()
    for head, c, slot in entries:
        wanted[head // heads, head % heads, slot] = host[head // heads % sequences, head % heads, c]
    gather_records(host, buffer, fetch_list(entries, device), **knobs)
    assert torch.equal(buffer.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("chunk", "head_dim"), [(8, 16), (1, 64), (4, 80)])
def test_every_dtype_and_record_size(dtype: torch.dtype, chunk: int, head_dim: int, device: str) -> None:
    check(host_records((3, 2, 7, 2, chunk, head_dim), dtype), 3, 5, 17, device, programs=3, rows=2)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
@pytest.mark.parametrize(("programs", "rows"), [(1, 1), (2, 4), (32, 8)])
def test_lists_of_any_length(count: int, programs: int, rows: int, device: str) -> None:
    check(host_records((2, 3, 9, 2, 8, 16), torch.bfloat16), 2, 5, count, device, programs=programs, rows=rows)


@pytest.mark.parametrize("sequences", [1, 2, 4])
def test_sequences_may_share_the_host_records(sequences: int, device: str) -> None:
    check(host_records((sequences, 2, 6, 2, 2, 16), torch.float32), 5, 4, 25, device)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_bytes_are_moved_as_they_are(dtype: torch.dtype, device: str) -> None:
    host = PinnedMemory(1 << 16).tensor((1, 1, 4, 2, 8, 16), torch.int8)
    host.copy_(torch.randint(-128, 128, host.shape, generator=torch.Generator().manual_seed(0)))
    buffer = torch.zeros((1, 1, 2, 2, 8, 16), dtype=torch.int8, device=device)
    gather_records(host.view(dtype), buffer.view(dtype), fetch_list([(0, 3, 1), (0, 1, 0)], device))
    assert torch.equal(buffer[0, 0].cpu(), host[0, 0, [1, 3]])


def test_a_step_leaves_the_wanted_records_in_the_buffer(device: str) -> None:
    """Prefetch, then the misses of a selection: by slot, the buffer gives the selection's records."""
    host = host_records((2, 2, 20, 2, 4, 16), torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    predicted, wanted = (torch.rand(2, 2, 20, generator=generator).argsort(-1)[..., :6] for _ in range(2))
    predicted[0, 1, 4:] = wanted[1, 0, 5:] = -1
    buffer = torch.full((2, 2, 6, 2, 4, 16), torch.nan, dtype=host.dtype, device=device)
    held = torch.full((2, 2, 6), -1, device=device)
    slot = torch.empty((2, 2, 6), dtype=torch.int32, device=device)
    fetch = FetchList.allocate(Ledger(device), 24)
    slots.replace_all(predicted.to(device), held, fetch)
    gather_records(host, buffer, fetch)
    fetch.count.zero_()
    slots.assign_slots(wanted.to(device), held, slot, fetch, slots.SlotWorkspace.allocate(Ledger(device), 4, 20, 6))
    gather_records(host, buffer, fetch)
    for b, k, s in (wanted >= 0).nonzero().tolist():
        assert torch.equal(buffer[b, k, slot[b, k, s]].cpu(), host[b, k, wanted[b, k, s]])


def test_host_and_buffer_must_agree(device: str) -> None:
    host = host_records((1, 1, 2, 2, 8, 16), torch.bfloat16)
    with pytest.raises(AssertionError):
        gather_records(host, torch.zeros(1, 1, 2, 2, 8, 16, device=device), fetch_list([], device))


@pytest.mark.parametrize(("sequences", "first"), [(4, 0), (4, 3), (3, 2), (1, 5)])
def test_values_alone_go_behind_the_place_of_the_keys(sequences: int, first: int, device: str) -> None:
    """Also for the later sequences of a host store, which another buffer's sequences share."""
    host = host_records((sequences, 2, 6, 1, 4, 16), torch.bfloat16)
    entries = [(head, (5 * head + slot) % 6, slot) for head in range(4) for slot in (2, 0)]
    buffer = torch.full((2, 2, 3, 2, 4, 16), torch.nan, dtype=host.dtype, device=device)
    wanted = buffer.cpu()
    for head, chunk, slot in entries:
        wanted[head // 2, head % 2, slot, 1] = host[(first + head // 2) % sequences, head % 2, chunk, 0]
    gather_records(host, buffer, fetch_list(entries, device), first=first)
    assert torch.equal(buffer.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("knobs", [{}, {"programs": 16, "rows": 8, "num_warps": 8}, {"programs": 8, "rows": 16}])
def test_full_size(knobs: dict[str, int]) -> None:
    check(host_records((2, 8, 2048, 2, 8, 128), torch.bfloat16), 4, 256, 5000, "cuda", **knobs)


@pytest.mark.gpu
def test_full_size_of_values_alone() -> None:
    host = host_records((2, 8, 2048, 1, 8, 128), torch.bfloat16)
    order = torch.rand(4, 8, 2048, generator=torch.Generator().manual_seed(2)).argsort(-1)[..., :200]
    entries = [(h, c, s) for h, row in enumerate(order.flatten(0, 1).tolist()) for s, c in enumerate(row)]
    buffer = torch.full((4, 8, 256, 2, 8, 128), torch.nan, dtype=host.dtype, device="cuda")
    gather_records(host, buffer, fetch_list(entries, "cuda"))
    keys, values = buffer.cpu().unbind(dim=3)
    assert keys.isnan().all()
    for b in range(4):
        for k in range(8):
            assert torch.equal(values[b, k, :200], host[b % 2, k, order[b, k], 0])


@pytest.mark.gpu
def test_a_graph_replays_with_new_indices() -> None:
    host = host_records((1, 2, 64, 2, 8, 128), torch.bfloat16)
    buffer = torch.zeros((1, 2, 8, 2, 8, 128), dtype=host.dtype, device="cuda")
    held, chunks = (torch.full((1, 2, 8), -1, device="cuda") for _ in range(2))
    fetch = FetchList.allocate(Ledger("cuda"), 16)

    def step() -> None:
        fetch.count.zero_()
        slots.replace_all(chunks, held, fetch)
        gather_records(host, buffer, fetch)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        new = torch.rand(1, 2, 64, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :8]
        chunks.copy_(new)
        graph.replay()
        assert torch.equal(buffer[0, 1].cpu(), host[0, 1, new[0, 1]])
