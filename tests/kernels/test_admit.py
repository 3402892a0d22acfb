"""The admission kernel against the reference: tables, clocks, counts and the list of copies, with ties everywhere."""

import pytest
import torch
from torch import Tensor

from baselines.admission import Prediction, ReferenceAdmission, Resident
from baselines.kernels.admit import TritonAdmission, admit_blocks
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.errors import ConfigError
from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.ledger import Ledger

# batch, KV heads, slots, blocks, cap
CASES = [
    (3, 2, 5, 9, 2),
    (2, 1, 1, 3, 1),
    (2, 3, 33, 90, 7),
    (1, 2, 153, 400, 8),
    (1, 1, 153, 250, 153),
    (1, 1, 512, 900, 60),
]


def some_of(blocks: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Distinct block numbers in random order, some of them missing."""
    number = torch.rand((*shape[:-1], max(blocks, shape[-1])), generator=generator).argsort(dim=-1)[..., : shape[-1]]
    missing = (torch.rand(shape, generator=generator) < 0.2) | (number >= blocks)
    return number.masked_fill(missing, -1)


def case(
    batch: int, heads: int, slots: int, blocks: int, seed: int, existing: int | None = None
) -> tuple[Tensor, Tensor, Prediction]:
    """Resident blocks, their clocks, and a prediction that is a view of two sets with few distinct scores."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, slots)
    held = some_of(existing or blocks, shape, generator)
    sets_B2KS = some_of(blocks, (batch, 2, heads, slots), generator)
    scores = torch.randint(-6, 6, (batch, heads, blocks), generator=generator) / 4
    # A zero of either sign is the same score.
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -0.0
    commit_B = torch.rand(batch, generator=generator) < 0.8
    commit_B[:1] = True
    clock_B = torch.randint(50, 60, (batch,), generator=generator)
    used = torch.randint(0, 4, shape, generator=generator)
    return held, used, Prediction(sets_B2KS[:, 1], scores.float(), clock_B, commit_B)


def resident_of(held: Tensor, used: Tensor, device: str) -> Resident:
    records = torch.zeros(*held.shape, 2, 1, 1, device=device)
    return Resident(ChunkBuffer(records, held.clone().to(device)), used.clone().to(device))


def listed(entries: Tensor, count: int) -> set[tuple[int, ...]]:
    found = [tuple(entry) for entry in entries[:, :count].T.tolist()]
    assert len(found) == len(set(found))
    return set(found)


def assert_matches(held: Tensor, used: Tensor, prediction: Prediction, cap: int, device: str) -> None:
    expected = resident_of(held, used, "cpu")
    counts_F = torch.zeros(3, dtype=torch.int64)
    reference = ReferenceAdmission(prediction.scores_BKN.shape[2], cap).admit(0, prediction, expected, counts_F)
    got, got_counts_F = resident_of(held, used, device), torch.tensor([5, 6, 7], device=device)
    heads = held.shape[0] * held.shape[1]
    fetch = FetchList.allocate(Ledger(device), heads * cap)
    fetch.entries.fill_(1 << 30)
    numbers = prediction.number_BKS
    # Keep the strides of a view.
    moved = numbers.to(device) if device == "cpu" else numbers._base.to(device)[:, 1]
    tables = (prediction.scores_BKN, prediction.clock_B, prediction.commit_B)
    on_device = Prediction(moved, *(t.to(device) for t in tables))
    admit_blocks(on_device, got, got_counts_F, fetch, cap)
    assert torch.equal(got.buffer.held_BKS.cpu(), expected.buffer.held_BKS)
    assert torch.equal(got.used_BKS.cpu(), expected.used_BKS)
    assert (got_counts_F.cpu() - torch.tensor([5, 6, 7])).tolist() == counts_F.tolist()
    head_BKQ = torch.arange(heads).view(*held.shape[:2], 1).expand_as(reference.chunk_BKS)
    wanted = torch.stack((head_BKQ, reference.chunk_BKS, reference.slot_BKS))[:, reference.where_BKS]
    assert int(fetch.count) == wanted.shape[1] == counts_F[2]
    assert listed(fetch.entries, int(fetch.count)) == listed(wanted, wanted.shape[1])
    assert (fetch.entries[:, int(fetch.count) :] == 1 << 30).all()


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_reference(sizes: tuple[int, ...], seed: int, device: str) -> None:
    *shape, cap = sizes
    assert_matches(*case(*shape, seed=seed), cap, device)


def test_a_nearly_empty_resident_set_fills_its_empty_slots(device: str) -> None:
    assert_matches(*case(2, 2, 40, 300, seed=1, existing=3), 16, device)


def test_nothing_predicted_and_nothing_new(device: str) -> None:
    held, used, prediction = case(2, 2, 12, 30, seed=2)
    prediction.number_BKS.fill_(-1)
    assert_matches(held, used, prediction, 4, device)
    prediction.number_BKS.copy_(held)
    assert_matches(held, used, prediction, 4, device)


def test_extreme_scores_keep_their_order(device: str) -> None:
    held, used, prediction = case(1, 2, 16, 40, seed=3)
    prediction.scores_BKN.mul_(torch.tensor([1e-38, 1e38]).repeat(20))
    assert_matches(held, used, prediction, 3, device)


def test_every_layer_has_its_own_list(device: str) -> None:
    held, used, prediction = case(2, 2, 12, 30, seed=4)
    on_device = Prediction(*(t.contiguous().to(device) for t in vars(prediction).values()))
    admission = TritonAdmission(Ledger(device), layers=3, heads=4, slots=12, cap=2)
    counts_F = torch.zeros(3, dtype=torch.int64, device=device)
    for _ in range(2):
        admission.begin_step()
        fetches = [admission.admit(i, on_device, resident_of(held, used, device), counts_F) for i in range(3)]
    assert len({listed_at.entries.data_ptr() for listed_at in fetches}) == 3
    assert len({int(fetch.count) for fetch in fetches}) == 1
    assert int(fetches[0].count) * 6 == int(counts_F[2]) > 0


def test_too_many_slots_are_refused(device: str) -> None:
    held, used, prediction = case(1, 1, 513, 600, seed=5)
    with pytest.raises(ConfigError, match="slots=513"):
        assert_matches(held, used, prediction, 4, device)
    with pytest.raises(ConfigError, match="budget"):
        TritonAdmission(Ledger(device), layers=1, heads=1, slots=513, cap=4)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("slots", "cap"), [(153, 8), (512, 26), (512, 512)])
def test_paper_size_on_the_gpu(slots: int, cap: int, seed: int) -> None:
    assert_matches(*case(24, 8, slots, 7625, seed=seed), cap, "cuda")
