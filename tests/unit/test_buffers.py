"""Slot assignment, the chunk buffer, the host store and the recent window."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualdecoder import window
from dualdecoder.buffers import ChunkBuffer, assign_slots
from dualdecoder.config import ModelConfig
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.ledger import Ledger
from dualdecoder.ops import Counting, ReferenceOps
from dualdecoder.telemetry import FIELDS

CHUNKS = 12
SHAPE = ModelConfig("two-heads", 2, 8, 8, 2, 2, 4, 16, 64)


@st.composite
def selections(draw: st.DrawFn) -> list[list[int]]:
    """Two lists of six places: distinct chunks, the rest empty; the first as selected (empty places last)."""
    wanted = draw(st.lists(st.integers(0, CHUNKS - 1), unique=True, max_size=6))
    held = draw(st.lists(st.integers(0, CHUNKS - 1), unique=True, max_size=6))
    empty = [NO_CHUNK] * 6
    return [(wanted + empty)[:6], draw(st.permutations((held + empty)[:6]))]


@given(selections())
def test_assigned_slots_keep_what_is_wanted(pair: list[list[int]]) -> None:
    wanted, held = pair
    slot, missing = assign_slots(torch.tensor([[wanted]]), torch.tensor([[held]]), CHUNKS)
    slot, missing = slot[0, 0].tolist(), missing[0, 0].tolist()
    real = [i for i, chunk in enumerate(wanted) if chunk != NO_CHUNK]
    assert [wanted[i] for i in range(6) if missing[i]] == [c for c in wanted if c != NO_CHUNK and c not in held]
    assert all(held[slot[i]] == wanted[i] for i in real if not missing[i])
    assert all(held[slot[i]] not in wanted or held[slot[i]] == NO_CHUNK for i in real if missing[i])
    assert len({slot[i] for i in real}) == len(real)


@given(selections(), st.integers(0, 2**16))
def test_buffer_gives_back_the_wanted_records(pair: list[list[int]], seed: int) -> None:
    """Whatever the buffer held: after the missing ones are put, taking by slot gives the host's records."""
    ledger = Ledger("cpu")
    store = HostStore(SHAPE, 1, CHUNKS, 2, torch.float32, ledger)
    store.records[1].copy_(torch.randn(store.records[1].shape, generator=torch.Generator().manual_seed(seed)))
    buffer = ChunkBuffer.allocate(SHAPE, 1, 6, 2, torch.float32, ledger)
    wanted_BKS, held_BKS = (torch.tensor([[chunks, chunks]]) for chunks in pair)
    ops = ReferenceOps(CHUNKS, 2)
    counting = Counting(torch.zeros(len(FIELDS), dtype=torch.int64), torch.tensor([True]))
    ops.fetch(store, 1, ops.replace(buffer, held_BKS), buffer)
    slot_BKS, misses = ops.find(wanted_BKS, buffer, counting)
    ops.fetch(store, 1, misses, buffer)
    taken = buffer.take(slot_BKS)
    for i, chunk in enumerate(buffer.held_BKS[0, 0].tolist()):
        if chunk != NO_CHUNK:
            assert torch.equal(buffer.records_BKSXCD[0, :, i], store.records[1][0, :, chunk])
    for i, chunk in enumerate(pair[0]):
        if chunk != NO_CHUNK:
            assert torch.equal(taken[0, :, i], store.records[1][0, :, chunk])


def test_host_store_writes_only_where_told() -> None:
    store = HostStore(SHAPE, 3, 4, 2, torch.float32, Ledger("cpu"))
    record_BKXCD = torch.randn(3, 2, 2, 2, 4)
    store.write_chunk(0, torch.tensor([0, 3, 1]), record_BKXCD, torch.tensor([True, False, True]))
    assert torch.equal(store.records[0][0, :, 0], record_BKXCD[0])
    assert torch.equal(store.records[0][2, :, 1], record_BKXCD[2])
    assert store.records[0][1].abs().sum() == 0
    assert store.records[1].abs().sum() == 0


def test_record_is_keys_then_values_in_one_piece() -> None:
    store = HostStore(ModelConfig("8b", 1, 8, 8, 8, 8, 128, 16, 64), 1, 2, 8, torch.bfloat16, Ledger("cpu"))
    assert store.record_bytes == 4096
    assert store.records[0][0, 3, 1].is_contiguous()


@given(start=st.integers(0, 10).map(lambda chunks: 2 * chunks), length=st.integers(0, 8))
def test_window_knows_its_tokens(start: int, length: int) -> None:
    window_BKXWD, kv_KXTD = torch.zeros(1, 2, 2, 8, 4), torch.randn(2, 2, length, 4)
    window.write_prompt(window_BKXWD[0], start, kv_KXTD)
    filled = window.filled_slots(8, torch.tensor([start]), torch.tensor([start + length]))[0]
    assert filled.sum() == length
    for t in range(length):
        slot = (start + t) % 8
        assert filled[slot]
        assert torch.equal(window_BKXWD[0, :, :, slot], kv_KXTD[:, :, t])


def test_window_chunk_and_token() -> None:
    window_BKXWD, kv_KXTD = torch.zeros(2, 2, 2, 8, 4), torch.randn(2, 2, 8, 4)
    for sequence, start in ((0, 6), (1, 4)):
        window.write_prompt(window_BKXWD[sequence], start, kv_KXTD)
    chunk = window.read_chunk(window_BKXWD, torch.tensor([6, 4]), 2)
    assert torch.equal(chunk[0], kv_KXTD[:, :, :2])
    assert torch.equal(chunk[1], kv_KXTD[:, :, :2])
    new_BKXD = torch.randn(2, 2, 2, 4)
    window.write_token(window_BKXWD, torch.tensor([14, 12]), new_BKXD, torch.tensor([True, False]))
    assert torch.equal(window_BKXWD[0, :, :, 14 % 8], new_BKXD[0])
    assert torch.equal(window_BKXWD[1, :, :, 12 % 8], kv_KXTD[:, :, 0])
