"""Slot assignment and fetch lists against the PyTorch reference."""

import pytest
import torch
from torch import Tensor

from dualdecoder import buffers
from dualdecoder.kernels import slots
from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.kernels.slots import SlotWorkspace
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.ledger import Ledger
from dualdecoder.ops import Counting, History, count_selection
from dualdecoder.telemetry import FIELDS

POISON = -777


def random_chunks(rows: tuple[int, int], places: int, chunks: int, filled: int, generator: torch.Generator) -> Tensor:
    """``[B, K, places]``: in random places up to ``filled`` distinct chunks, the others ``NO_CHUNK``."""
    filled = min(filled, places, chunks)
    lists = []
    for _ in range(rows[0] * rows[1]):
        number = int(torch.randint(filled + 1, (1,), generator=generator))
        chosen = torch.randperm(chunks, generator=generator)[:number]
        padded = torch.cat((chosen, torch.full((places - number,), NO_CHUNK)))
        lists.append(padded[torch.randperm(places, generator=generator)])
    return torch.stack(lists).view(*rows, places)


def poisoned(capacity: int, device: str) -> FetchList:
    fetch = FetchList.allocate(Ledger(device), capacity)
    fetch.entries.fill_(POISON)
    return fetch


def workspace_of(wanted_BKS: Tensor, chunks: int, device: str) -> SlotWorkspace:
    batch, heads, selected = wanted_BKS.shape
    workspace = SlotWorkspace.allocate(Ledger(device), batch * heads, chunks, selected)
    workspace.order.fill_(POISON)
    return workspace


def assert_empty(workspace: SlotWorkspace) -> None:
    """As the next launch needs it."""
    assert not workspace.slot_after.any() and not workspace.wanted.any()


def listed(fetch: FetchList) -> list[tuple[int, ...]]:
    """The entries, sorted; checks that nothing lies beyond them."""
    number = int(fetch.count)
    assert (fetch.entries[:, number:] == POISON).all()
    return sorted(zip(*fetch.entries[:, :number].tolist(), strict=True))


def expected(chunk_BKS: Tensor, slot_BKS: Tensor, where_BKS: Tensor) -> list[tuple[int, ...]]:
    heads = chunk_BKS.shape[1]
    places = where_BKS.nonzero().tolist()
    return sorted((b * heads + k, int(chunk_BKS[b, k, s]), int(slot_BKS[b, k, s])) for b, k, s in places)


# B, K, S, Z, chunks
SHAPES = [
    (1, 1, 1, 1, 2), (3, 2, 5, 5, 9), (2, 3, 7, 12, 20), (1, 2, 256, 256, 700), (1, 1, 100, 300, 500),
    (2, 2, 200, 256, 65536), (1, 1, 3, 4096, 4100),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_assignment_is_that_of_the_reference(shape: tuple[int, ...], seed: int, device: str) -> None:
    batch, heads, selected, places, chunks = shape
    generator = torch.Generator().manual_seed(seed)
    wanted_BKS = random_chunks((batch, heads), selected, chunks, selected, generator)
    held_BKZ = random_chunks((batch, heads), places, chunks, places, generator)
    slot_BKS, missing_BKS = reference(wanted_BKS, held_BKZ, chunks)
    fetch = poisoned(wanted_BKS.numel() + 3, device)
    got_slot_BKS = torch.full(wanted_BKS.shape, POISON, dtype=torch.int32, device=device)
    got_held_BKZ = held_BKZ.to(device)
    workspace = workspace_of(wanted_BKS, chunks, device)
    slots.assign_slots(wanted_BKS.to(device), got_held_BKZ, got_slot_BKS, fetch, workspace)
    assert_empty(workspace)
    assert torch.equal(got_slot_BKS.cpu().long(), slot_BKS)
    assert listed(fetch) == expected(wanted_BKS, slot_BKS, missing_BKS)
    assert torch.equal(got_held_BKZ.cpu(), held_afterwards(wanted_BKS, held_BKZ, slot_BKS, missing_BKS))


def reference(wanted_BKS: Tensor, held_BKZ: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """``buffers.assign_slots``, which wants as many places as there are slots."""
    extra = held_BKZ.shape[-1] - wanted_BKS.shape[-1]
    padded_BKZ = torch.nn.functional.pad(wanted_BKS, (0, extra), value=NO_CHUNK)
    slot_BKZ, missing_BKZ = buffers.assign_slots(padded_BKZ, held_BKZ, chunks)
    return slot_BKZ[..., : wanted_BKS.shape[-1]], missing_BKZ[..., : wanted_BKS.shape[-1]]


def held_afterwards(wanted_BKS: Tensor, held_BKZ: Tensor, slot_BKS: Tensor, missing_BKS: Tensor) -> Tensor:
    after_BKZ = held_BKZ.clone()
    for b, k, s in missing_BKS.nonzero().tolist():
        after_BKZ[b, k, slot_BKS[b, k, s]] = wanted_BKS[b, k, s]
    return after_BKZ


def test_missing_chunks_can_be_marked(device: str) -> None:
    """Slot -1 for what is missing; the list, which still brings them to their slots, and the table stay the same."""
    wanted_BKS, held_BKZ = torch.tensor([[[4, 1, NO_CHUNK, 5]]]), torch.tensor([[[1, 2, 3, 5]]])
    results = []
    for marks in (False, True):
        slot = torch.full((1, 1, 4), POISON, dtype=torch.int32, device=device)
        fetch, held = poisoned(4, device), held_BKZ.clone().to(device)
        workspace = workspace_of(wanted_BKS, 6, device)
        slots.assign_slots(wanted_BKS.to(device), held, slot, fetch, workspace, marks_missing=marks)
        results.append((slot.tolist(), listed(fetch), held.tolist()))
    assert results[0][0] == [[[1, 0, 0, 3]]] and results[1][0] == [[[-1, 0, 0, 3]]]
    assert results[0][1:] == results[1][1:] == ([(0, 4, 1)], [[[1, 4, 3, 5]]])


@pytest.mark.parametrize("wanted", [[0, 1, 2], [2, 0, 1], [3, 4, 5], [NO_CHUNK] * 3])
def test_edges(wanted: list[int], device: str) -> None:
    """All held (nothing moves), none held (everything is replaced), nothing wanted."""
    held = torch.tensor([[[0, 1, 2]]], device=device)
    slot = torch.full((1, 1, 3), POISON, dtype=torch.int32, device=device)
    fetch = poisoned(3, device)
    wanted_BKS = torch.tensor([[wanted]], device=device)
    slots.assign_slots(wanted_BKS, held, slot, fetch, workspace_of(wanted_BKS, 6, device))
    assert int(fetch.count) == sum(chunk > 2 for chunk in wanted)
    assert slot[0, 0].tolist() == [chunk % 3 if chunk != NO_CHUNK else 0 for chunk in wanted]
    assert held[0, 0].tolist() == ([3, 4, 5] if 3 in wanted else [0, 1, 2])


def test_held_follows(device: str) -> None:
    """Asked twice for the same, a buffer lacks nothing the second time: the list does not grow."""
    wanted = torch.tensor([[[5, 9, 2], [8, NO_CHUNK, 1]]], device=device)
    held = torch.full((1, 2, 4), NO_CHUNK, device=device)
    slot, fetch = torch.empty((1, 2, 3), dtype=torch.int32, device=device), poisoned(6, device)
    workspace, counts = workspace_of(wanted, 10, device), []
    for _ in range(2):
        slots.assign_slots(wanted, held, slot, fetch, workspace)
        counts.append(int(fetch.count))
    assert counts == [5, 5]


@pytest.mark.parametrize("comparable", [True, False, None])
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_the_reference(comparable: bool | None, seed: int, device: str) -> None:
    """Repeated launches, as of the layers of a step; history None, or only written, or compared with and written."""
    generator = torch.Generator().manual_seed(seed)
    workspace = workspace_of(torch.empty(3, 2, 6), 9, device)
    for _ in range(3):
        wanted, predicted, previous, held, following = (random_chunks((3, 2), 6, 9, 6, generator) for _ in range(5))
        commit_B = torch.rand(3, generator=generator) < 0.7
        wanted_counts, counts = torch.arange(2 * len(FIELDS)).view(2, -1), torch.arange(2 * len(FIELDS)).view(2, -1)
        history = None if comparable is None else History(predicted, previous, following, comparable)
        count_selection(Counting(wanted_counts[1], commit_B, history), wanted, held, 9)
        history = history and History(*(t.to(device) for t in (predicted, previous, following)), comparable)
        counts, slot = counts.to(device), torch.empty(wanted.shape, dtype=torch.int32, device=device)
        counting = Counting(counts[1], commit_B.to(device), history)
        slots.assign_slots(wanted.to(device), held.to(device), slot, poisoned(36, device), workspace, counting)
        assert torch.equal(counts.cpu(), wanted_counts)
        assert_empty(workspace)
        if history:
            assert torch.equal(history.predicted_BKS.cpu(), following)
            assert torch.equal(history.selected_BKS.cpu(), wanted)


def test_a_prediction_may_be_a_strided_view(device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    sets_BRKS = torch.stack([random_chunks((3, 2), 5, 9, 5, generator) for _ in range(2)], dim=1).to(device)
    tables = [torch.full((3, 2, 5), NO_CHUNK, device=device) for _ in range(3)]
    history = History(*tables[:2], sets_BRKS[:, 1], comparable=True)
    counting = Counting(torch.zeros(len(FIELDS), dtype=torch.int64, device=device), history=history,
                        commit_B=torch.ones(3, dtype=torch.bool, device=device))  # fmt: skip
    slot, workspace = torch.empty((3, 2, 5), dtype=torch.int32, device=device), workspace_of(tables[0], 9, device)
    slots.assign_slots(sets_BRKS[:, 0], tables[2], slot, poisoned(30, device), workspace, counting)
    assert torch.equal(torch.stack((history.selected_BKS, history.predicted_BKS), dim=1), sets_BRKS)
    assert counting.counts_F[FIELDS.index("predicted")] == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_a_step_need_no_copy(dtype: torch.dtype, device: str) -> None:
    """One row of a selection [B, R, K, S] is a strided view."""
    generator = torch.Generator().manual_seed(7)
    sets_BRKS = torch.stack([random_chunks((3, 2), 5, 9, 5, generator) for _ in range(2)], dim=1).to(dtype)
    true_BKS, predicted_BKS = sets_BRKS.to(device).unbind(1)
    held = torch.full((3, 2, 5), NO_CHUNK, device=device)
    slot, fetch = torch.empty((3, 2, 5), dtype=torch.int32, device=device), poisoned(30, device)
    slots.replace_all(predicted_BKS, held, fetch)
    fetch.count.zero_()
    assert torch.equal(held.cpu(), sets_BRKS[:, 1].long())
    slots.assign_slots(true_BKS, held, slot, fetch, workspace_of(true_BKS, 9, device))
    wanted_slot, _ = buffers.assign_slots(sets_BRKS[:, 0].long(), sets_BRKS[:, 1].long(), 9)
    assert torch.equal(slot.cpu().long(), wanted_slot)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (2, 1, 256)])
def test_replacing_everything(shape: tuple[int, ...], device: str) -> None:
    chunk_BKS = random_chunks(shape[:2], shape[2], 300, 300, torch.Generator().manual_seed(0))
    held_BKS = torch.full(shape, POISON, device=device)
    fetch = poisoned(chunk_BKS.numel(), device)
    slots.replace_all(chunk_BKS.to(device), held_BKS, fetch)
    assert torch.equal(held_BKS.cpu(), chunk_BKS)
    slot_BKS = torch.arange(shape[2]).expand(shape)
    assert listed(fetch) == expected(chunk_BKS, slot_BKS, chunk_BKS != NO_CHUNK)


def test_list_and_buffer_must_fit(device: str) -> None:
    wanted = torch.zeros(1, 1, 3, dtype=torch.int64, device=device)
    slot = torch.empty(1, 1, 3, dtype=torch.int32, device=device)
    workspace = workspace_of(wanted, 4, device)
    with pytest.raises(AssertionError, match="needs a slot"):
        slots.assign_slots(wanted, wanted[..., :2].contiguous(), slot, poisoned(3, device), workspace)
    with pytest.raises(AssertionError, match="hold every chunk"):
        slots.assign_slots(wanted, wanted.clone(), slot, poisoned(2, device), workspace)
    with pytest.raises(AssertionError, match="the selection's shape"):
        slots.assign_slots(wanted, wanted.clone(), slot, poisoned(3, device), workspace_of(wanted[..., 1:], 4, device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(24, 8, 256, 256, 16384), (24, 8, 256, 1024, 16384), (3, 8, 256, 4096, 16384)])
def test_full_size(shape: tuple[int, ...]) -> None:
    test_assignment_is_that_of_the_reference(shape, 0, "cuda")
