"""The append kernel against the reference's tail, store and bounds."""

import pytest
import torch
from torch import Tensor

from baselines.kernels.append import append_token
from baselines.summaries import BLOCK, BlockState, Lengths, ReferenceBlockOps
from dualdecoder.errors import ConfigError
from dualdecoder.pinned import PinnedMemory

BLOCKS = 5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class State:
    """One layer's tail, store and bounds on the CPU, filled with random numbers; k and v are views of one tensor."""

    def __init__(self, batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, sequences: int = 0) -> None:
        generator = torch.Generator().manual_seed(batch)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        self.tail_BKXCD = normal(batch, kv_heads, 2, BLOCK, head_dim)
        self.records_AKNXCD = normal(sequences or batch, kv_heads, BLOCKS, 2, BLOCK, head_dim)
        self.bounds_BKNYD = normal(batch, kv_heads, BLOCKS, 2, head_dim)
        fused_BHD = normal(batch, 3 * kv_heads, head_dim)
        self.k_BKD, self.v_BKD = fused_BHD.split(kv_heads, dim=1)[1:]
        # Every other sequence fills a block.
        self.length_B = torch.randint(0, BLOCKS * BLOCK, (batch,), generator=generator)
        self.length_B[::2] |= BLOCK - 1
        self.commit_B = torch.rand(batch, generator=generator) < 0.7
        self.commit_B[:1] = True

    def tables(self) -> list[Tensor]:
        return [self.tail_BKXCD, self.records_AKNXCD, self.bounds_BKNYD]

    def by_reference(self) -> list[Tensor]:
        tail, records, bounds = (t.clone() for t in self.tables())
        lengths = Lengths(self.length_B, self.length_B // BLOCK * BLOCK)
        ReferenceBlockOps().append(
            self.k_BKD, self.v_BKD, BlockState(bounds, tail), records, lengths, self.commit_B
        )  # fmt: skip
        return [tail, records, bounds]

    def by_kernel(self, device: str) -> list[Tensor]:
        tail, _, bounds = (t.clone().to(device) for t in self.tables())
        memory = PinnedMemory(self.records_AKNXCD.nbytes, piece=1 << 20)
        records = memory.tensor(self.records_AKNXCD.shape, self.records_AKNXCD.dtype).copy_(self.records_AKNXCD)
        moved = (t.to(device) for t in (self.k_BKD, self.v_BKD, self.length_B, self.commit_B))
        append_token(tail, records, bounds, *moved)
        if device == "cuda":
            torch.cuda.synchronize()
        return [t.cpu().clone() for t in (tail, records, bounds)]


def assert_equal_memory(state: State, device: str) -> None:
    for got, expected in zip(state.by_kernel(device), state.by_reference(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "kv_heads", "head_dim"), [(1, 1, 16), (6, 3, 64), (3, 2, 128)])
def test_equals_the_reference(batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    assert_equal_memory(State(batch, kv_heads, head_dim, dtype), device)


def test_a_full_block_holds_its_sixteen_tokens(device: str) -> None:
    """Token by token from an empty tail of NaN: the block and its bounds are those of the text."""
    text_TXD = torch.randn(BLOCK, 2, 16)
    state = State(1, 1, 16, torch.float32)
    state.tail_BKXCD.fill_(torch.nan)
    for position, (k_D, v_D) in enumerate(text_TXD):
        state.length_B = torch.tensor([BLOCK + position])
        state.k_BKD, state.v_BKD = k_D.view(1, 1, 16), v_D.view(1, 1, 16)
        state.tail_BKXCD, state.records_AKNXCD, state.bounds_BKNYD = state.by_kernel(device)
    assert torch.equal(state.records_AKNXCD[0, 0, 1], text_TXD.transpose(0, 1))
    assert torch.equal(state.bounds_BKNYD[0, 0, 1, 0], text_TXD[:, 0].amin(dim=0))
    assert torch.equal(state.bounds_BKNYD[0, 0, 1, 1], text_TXD[:, 0].amax(dim=0))


def test_a_sequence_at_the_end_of_its_capacity_is_left_alone(device: str) -> None:
    state = State(2, 1, 16, torch.float32)
    state.length_B.fill_(BLOCKS * BLOCK), state.commit_B.fill_(False)
    assert_equal_memory(state, device)
    for got, before in zip(state.by_kernel(device), state.tables(), strict=True):
        assert torch.equal(got, before)


def test_sequences_may_share_host_memory(device: str) -> None:
    state = State(4, 1, 16, torch.float32, sequences=3)
    state.commit_B.copy_(torch.tensor([False, False, False, True]))
    state.length_B[3] = 2 * BLOCK + 15
    _, records, bounds = state.by_kernel(device)
    assert torch.equal(records[0, :, 2, 0, -1], state.k_BKD[3])
    assert torch.equal(records[1:], state.records_AKNXCD[1:])
    assert torch.equal(bounds[3, :, 2, 1], records[0, :, 2, 0].amax(dim=1))


def test_a_head_size_without_a_kernel_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="head_dim=12"):
        State(1, 1, 12, torch.float32).by_kernel(device)


@pytest.mark.gpu
def test_pageable_host_memory_is_refused() -> None:
    state = State(1, 1, 16, torch.float32)
    tail, bounds = state.tail_BKXCD.cuda(), state.bounds_BKNYD.cuda()
    tables = (t.cuda() for t in (state.k_BKD, state.v_BKD, state.length_B, state.commit_B))
    with pytest.raises(ConfigError, match="records"):
        append_token(tail, state.records_AKNXCD, bounds, *tables)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_paper_size_on_the_gpu(dtype: torch.dtype) -> None:
    assert_equal_memory(State(24, 8, 128, dtype), "cuda")
