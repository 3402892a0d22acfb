"""Capped admission against a simulation with lists and dicts, set by set over many steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.admission import Prediction, ReferenceAdmission, Resident
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import ModelConfig
from dualdecoder.host_store import HostStore
from dualdecoder.ledger import Ledger
from tests.baselines.block_reference import ResidentSet

MODEL = ModelConfig("one-layer", 1, 8, 8, 2, 2, 2, 16, 4096)


@settings(max_examples=25)
@given(
    slots=st.integers(1, 9), blocks=st.integers(1, 30), cap=st.integers(1, 9), seed=st.integers(0, 999),
    distinct=st.sampled_from([2, 1000]),
)  # fmt: skip
def test_many_steps_follow_the_simulation(slots: int, blocks: int, cap: int, seed: int, distinct: int) -> None:
    """Few distinct scores make ties; blocks grow with time, and at first there are fewer than slots."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, cap = 3, 2, min(cap, slots)
    ledger = Ledger("cpu")
    buffer = ChunkBuffer.allocate(MODEL, batch, slots, 16, torch.float32, ledger)
    resident = Resident(buffer, torch.zeros(batch, heads, slots, dtype=torch.int64))
    host = HostStore(MODEL, batch, blocks, 16, torch.float32, ledger)
    host.fill_normal(0, generator)
    admission, counts_F = ReferenceAdmission(blocks, cap), torch.zeros(3, dtype=torch.int64)
    simulated = [[ResidentSet([None] * slots, {}) for _ in range(heads)] for _ in range(batch)]
    admitted = 0
    for clock in range(40):
        existing = min(blocks, 1 + clock // 2)
        scores_BKN = torch.randint(distinct, (batch, heads, blocks), generator=generator).float()
        number_BKS = torch.full((batch, heads, slots), -1)
        commit_B = torch.rand(batch, generator=generator) < 0.8
        for b in range(batch):
            for k in range(heads):
                score = scores_BKN[b, k].tolist()
                best = sorted(range(existing), key=lambda n: (-score[n], n))[:slots]
                order = torch.randperm(slots, generator=generator)
                number_BKS[b, k, order[: len(best)]] = torch.tensor(best)
                if commit_B[b]:
                    admitted += len(simulated[b][k].admit(best, cap, clock))
        prediction = Prediction(number_BKS, scores_BKN, torch.full((batch,), clock), commit_B)
        fetch = admission.admit(0, prediction, resident, counts_F)
        admission.fetch(host, 0, fetch, buffer)
        for b in range(batch):
            for k in range(heads):
                held = [None if n < 0 else n for n in buffer.held_BKS[b, k].tolist()]
                assert held == simulated[b][k].slots
                for slot, block in enumerate(held):
                    if block is not None:
                        assert resident.used_BKS[b, k, slot] == simulated[b][k].used[block]
                        assert torch.equal(buffer.records_BKSXCD[b, k, slot], host.records[0][b, k, block])
    assert counts_F[2] == admitted


def test_order_of_admission_and_eviction() -> None:
    """By hand: slots hold 7, 3, 9 (empty), 5; 3 was predicted longest ago, 7 and 5 at the same time."""
    buffer = ChunkBuffer.allocate(MODEL, 1, 4, 16, torch.float32, Ledger("cpu"))
    buffer.held_BKS.copy_(torch.tensor([7, 3, -1, 5]))
    resident = Resident(buffer, torch.tensor([4, 2, 9, 4]).expand(1, 2, 4).contiguous())
    scores_BKN = torch.tensor([0.0, 8, 6, 0, 6, 1, 0, 0, 0, 0]).expand(1, 2, 10)
    prediction = Prediction(
        torch.tensor([4, 2, 1, 5]).expand(1, 2, 4), scores_BKN, torch.tensor([10]), torch.tensor([True])
    )
    counts_F = torch.zeros(3, dtype=torch.int64)
    fetch = ReferenceAdmission(10, 2).admit(0, prediction, resident, counts_F)
    assert buffer.held_BKS[0].tolist() == [[7, 2, 1, 5]] * 2  # 1 is best; 2 and 4 tie
    assert resident.used_BKS[0].tolist() == [[4, 10, 10, 10]] * 2
    assert (fetch.chunk_BKS[0].tolist(), fetch.slot_BKS[0].tolist()) == ([[1, 2]] * 2, [[2, 1]] * 2)
    assert counts_F.tolist() == [8, 2, 4]


@pytest.mark.parametrize("commit", [False, True])
def test_only_committed_sequences_change(commit: bool) -> None:
    buffer = ChunkBuffer.allocate(MODEL, 1, 1, 16, torch.float32, Ledger("cpu"))
    resident = Resident(buffer, torch.zeros(1, 2, 1, dtype=torch.int64))
    numbers, scores = torch.zeros(1, 2, 1, dtype=torch.int64), torch.ones(1, 2, 3)
    prediction = Prediction(numbers, scores, torch.tensor([5]), torch.tensor([commit]))
    counts_F = torch.zeros(3, dtype=torch.int64)
    fetch = ReferenceAdmission(3, 1).admit(0, prediction, resident, counts_F)
    assert bool(fetch.where_BKS.any()) == bool((buffer.held_BKS == 0).any()) == commit
    assert counts_F.tolist() == ([2, 0, 2] if commit else [0, 0, 0])
