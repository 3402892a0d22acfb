"""The commit kernel against the window, host store and landmarks of the reference."""

import pytest
import torch
from torch import Tensor

from dualdecoder.errors import ConfigError
from dualdecoder.kernels.commit import append_token, commit_step
from dualdecoder.landmarks import chunk_landmarks
from dualdecoder.window import read_chunk, write_token

# batch, KV heads, chunk, window, head size, dtype
CASES = [
    (5, 2, 8, 16, 16, torch.float32),
    (3, 1, 2, 10, 32, torch.float16),
    (4, 3, 8, 24, 64, torch.bfloat16),
    (2, 2, 1, 3, 16, torch.float32),
]
CHUNKS = 13


class State:
    """One layer's window, host records and landmarks on the CPU, filled with random numbers."""

    def __init__(
        self, batch: int, kv_heads: int, chunk: int, window: int, head_dim: int, dtype: torch.dtype, seed: int
    ) -> None:
        g = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=g).to(dtype)

        lead = (batch, kv_heads)
        self.tokens, self.chunk = window, chunk
        self.window_BKXWD = normal(*lead, 2, window, head_dim)
        self.host_BKNXCD = normal(*lead, CHUNKS, 2, chunk, head_dim)
        self.landmarks_BKND = normal(*lead, CHUNKS, head_dim)
        self.fused_BRHD = normal(batch, 2, 3 * kv_heads, head_dim)
        self.k_BKD, self.v_BKD = self.fused_BRHD[:, 0].split(kv_heads, dim=1)[1:]
        self.chunks_B = torch.randint(0, CHUNKS, (batch,), generator=g)
        full_B = torch.rand(batch, generator=g) < 0.6
        self.commit_B = torch.rand(batch, generator=g) < 0.7
        self.flush_B = self.commit_B & full_B
        self.length_B = self.chunks_B * chunk + torch.randint(0, window, (batch,), generator=g)
        self.length_B = self.length_B.where(~full_B, self.chunks_B * chunk + window)

    def results(self) -> list[Tensor]:
        return [self.window_BKXWD, self.host_BKNXCD, self.landmarks_BKND]

    def tables(self, device: str) -> list[Tensor]:
        tables = (self.chunks_B * self.chunk, self.length_B, self.flush_B, self.commit_B)
        return [table.to(device) for table in tables]

    def oldest(self) -> Tensor:
        return read_chunk(self.window_BKXWD, self.chunks_B * self.chunk, self.chunk)

    def commit(self) -> None:
        """Sequence by sequence, from the definition."""
        record_BKXCD = self.oldest()
        for b in self.flush_B.nonzero().flatten().tolist():
            self.host_BKNXCD[b, :, self.chunks_B[b]] = record_BKXCD[b]
            self.landmarks_BKND[b, :, self.chunks_B[b]] = chunk_landmarks(record_BKXCD[b : b + 1, :, 0])[0]
        kv_BKXD = torch.stack((self.k_BKD, self.v_BKD), dim=2)
        write_token(self.window_BKXWD, self.length_B, kv_BKXD, self.commit_B)


def commit_by_kernel(state: State, device: str) -> list[Tensor]:
    """Window, host records and landmarks after the kernel; the state stays as it is."""
    window, host, landmarks = (t.clone() for t in state.results())
    window, landmarks = window.to(device), landmarks.to(device)
    host = host.pin_memory() if device == "cuda" else host
    kv_heads = window.shape[1]
    _, k_BKD, v_BKD = state.fused_BRHD.to(device)[:, 0].split(kv_heads, dim=1)
    commit_step(window, host, landmarks, k_BKD, v_BKD, *state.tables(device))
    if device == "cuda":
        torch.cuda.synchronize()
    return [window.cpu(), host, landmarks.cpu()]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_reference(case: tuple, seed: int, device: str) -> None:
    state = State(*case, seed=seed)
    window, host, landmarks = commit_by_kernel(state, device)
    state.commit()
    assert torch.equal(window, state.window_BKXWD)
    assert torch.equal(host, state.host_BKNXCD)
    # The mean may be summed in another order, and the interpreter truncates when it converts to bf16.
    unit = torch.finfo(case[-1]).eps
    torch.testing.assert_close(landmarks, state.landmarks_BKND, rtol=unit, atol=unit)


def test_the_chunk_is_read_before_the_token_takes_its_slot(device: str) -> None:
    state = State(*CASES[0], seed=0)
    state.flush_B.fill_(True), state.commit_B.fill_(True)
    state.length_B = state.chunks_B * state.chunk + state.tokens
    window, host, _ = commit_by_kernel(state, device)
    rows = torch.arange(len(window))
    assert torch.equal(host[rows, :, state.chunks_B], state.oldest())
    assert torch.equal(window[rows, :, 0, state.length_B % state.tokens], state.k_BKD)


def test_sequences_may_share_host_memory(device: str) -> None:
    """As for a benchmark whose host memory is too short: sequence b writes to host sequence b % A."""
    state = State(*CASES[0], seed=0)
    state.flush_B.fill_(False), state.commit_B.fill_(False)
    state.flush_B[3] = True
    expected = state.oldest()[3]
    state.host_BKNXCD = state.host_BKNXCD[:2].clone()
    _, host, _ = commit_by_kernel(state, device)
    assert torch.equal(host[1, :, state.chunks_B[3]], expected)
    assert torch.equal(host[0], state.host_BKNXCD[0])


def test_nothing_to_do_leaves_no_trace(device: str) -> None:
    state = State(*CASES[2], seed=1)
    state.flush_B.fill_(False), state.commit_B.fill_(False)
    for got, before in zip(commit_by_kernel(state, device), state.results(), strict=True):
        assert torch.equal(got, before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_appending_writes_the_token_alone(case: tuple, device: str) -> None:
    state = State(*case, seed=3)
    window = state.window_BKXWD.to(device)
    _, k_BKD, v_BKD = state.fused_BRHD.to(device)[:, 0].split(window.shape[1], dim=1)
    append_token(window, k_BKD, v_BKD, state.length_B.to(device), state.commit_B.to(device))
    write_token(state.window_BKXWD, state.length_B, torch.stack((state.k_BKD, state.v_BKD), dim=2), state.commit_B)
    assert torch.equal(window.cpu(), state.window_BKXWD)


def test_a_chunk_without_a_kernel_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="chunk=3"):
        commit_by_kernel(State(1, 1, 3, 9, 16, torch.float32, seed=0), device)


@pytest.mark.gpu
def test_pageable_host_memory_is_refused() -> None:
    state = State(*CASES[0], seed=0)
    window, landmarks = state.window_BKXWD.cuda(), state.landmarks_BKND.cuda()
    with pytest.raises(ConfigError, match="pinned"):
        commit_step(window, state.host_BKNXCD, landmarks, state.k_BKD.cuda(), state.v_BKD.cuda(), *state.tables("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_paper_size_on_the_gpu(seed: int) -> None:
    test_equals_the_reference((24, 8, 8, 64, 128, torch.bfloat16), seed, "cuda")
