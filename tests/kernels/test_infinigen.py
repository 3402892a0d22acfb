"""InfiniGen's choice, fetch and append in Triton against PyTorch; workspaces start as NaN or nonsense."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baselines.infinigen_ops import ReferenceOps, guessed_scores, top_tokens
from baselines.kernels.infinigen import TritonOps
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import ModelConfig
from dualdecoder.host_store import HostStore
from dualdecoder.ledger import Ledger


@dataclass(frozen=True)
class Shape:
    batch: int = 3
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 16
    columns: int = 8
    tokens: int = 70
    slots: int = 9
    alpha: float = 5.0
    dtype: torch.dtype = torch.float32

    @property
    def model(self) -> ModelConfig:
        return ModelConfig("m", 1, 8, 8, self.kv_heads * self.group, self.kv_heads, self.head_dim, 8, 1 << 20)


SHAPES = {
    "plain": Shape(),
    "several spans": Shape(tokens=2500, slots=300, group=1),
    "all columns": Shape(head_dim=32, columns=32, group=4),
    "odd columns": Shape(head_dim=64, columns=40, alpha=1.0, tokens=257),
    "half": Shape(dtype=torch.float16, head_dim=64, columns=24, tokens=140, slots=140),
    "bfloat": Shape(dtype=torch.bfloat16, head_dim=128, columns=40, tokens=1100, slots=64, group=8),
}


class Case:
    """Guessed queries, partial keys (NaN beyond the length), lengths from 1 to all, and both kinds of operations."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        self.shape, self.device, s = shape, device, shape
        self.generator = torch.Generator().manual_seed(seed)
        self.query = self.normal(s.batch, s.kv_heads, s.group, s.columns)
        self.partial = self.normal(s.batch, s.kv_heads, s.tokens, s.columns)
        self.length_B = torch.randint(1, s.tokens + 1, (s.batch,), generator=self.generator)
        self.length_B[0], self.length_B[-1] = 1, s.tokens
        self.length_B = self.length_B.to(device)
        ledger = Ledger(device)
        self.host = HostStore(s.model, s.batch, s.tokens, 1, s.dtype, ledger)
        self.host.records[0].copy_(torch.randn(self.host.records[0].shape, generator=self.generator))
        self.buffer = ChunkBuffer.allocate(s.model, s.batch, s.slots, 1, s.dtype, ledger)
        self.buffer.records_BKSXCD.fill_(torch.nan)
        sizes = (s.batch, s.tokens, s.slots)
        self.ops = TritonOps(s.model, s.alpha, *sizes, dtype=s.dtype, ledger=ledger)
        for tensor in (self.ops.logits_BHT, self.ops.peaks_BHZ, self.ops.whole_BKTXCD):
            tensor.fill_(torch.nan)
        for tensor in (self.ops.ranked_BKT, self.ops.counts_BKZ, *self.ops.best, self.ops.chosen.entries):
            tensor.fill_(1 << 30)
        self.wanted_B = torch.full((s.batch,), -1, device=device)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).mul(2).to(self.shape.dtype).to(self.device)

    def choose(self) -> Tensor:
        """The table, as the kernels fill it."""
        beyond = torch.arange(self.shape.tokens, device=self.device) >= self.length_B[:, None]
        poisoned = self.partial.masked_fill(beyond[:, None, :, None], torch.nan)
        self.ops.choose(self.query, poisoned, self.length_B, self.wanted_B, self.buffer)
        return self.buffer.held_BKS

    def scores(self) -> Tensor:
        return guessed_scores(self.query, self.partial, self.length_B, self.shape.head_dim**-0.5)


def check_choice(case: Case) -> None:
    """Rounding may move a score over -alpha or past another; the choice must be right to within it."""
    held, scores = case.choose(), case.scores()
    alpha, epsilon = case.shape.alpha, 1e-4
    fewest, most = (
        ((scores > limit).sum(dim=(1, 2)) // case.shape.kv_heads).clamp(max=case.shape.slots)
        for limit in (-alpha + epsilon, -alpha - epsilon)
    )
    assert ((case.wanted_B >= fewest) & (case.wanted_B <= most)).all()
    expected = top_tokens(scores, case.wanted_B, case.shape.slots)
    assert torch.equal(held < 0, expected < 0)
    got, best = (scores.gather(-1, t.clamp(min=0)).masked_fill(t < 0, 0) for t in (held, expected))
    torch.testing.assert_close(got, best, atol=epsilon, rtol=0)
    for head in held.flatten(0, 1).tolist():
        tokens = [t for t in head if t >= 0]
        assert len(set(tokens)) == len(tokens)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_choice_is_the_references(name: str, seed: int, device: str) -> None:
    check_choice(Case(SHAPES[name], device, seed))


def test_ties_go_to_the_lower_position(device: str) -> None:
    """Whole numbers, so that nothing rounds: few different scores, and the cut lies among equal ones."""
    case = Case(Shape(tokens=1500, slots=40, alpha=30.0), device)
    for tensor in (case.query, case.partial):
        tensor.copy_(torch.randint(-1, 2, tensor.shape, generator=case.generator))
    held = case.choose().clone()
    reference = ChunkBuffer(case.buffer.records_BKSXCD.clone(), torch.empty_like(case.buffer.held_BKS))
    wanted_B = torch.empty_like(case.wanted_B)
    ReferenceOps(30.0, 40).choose(case.query, case.partial, case.length_B, wanted_B, reference)
    assert torch.equal(case.wanted_B, wanted_B)
    assert torch.equal(held, reference.held_BKS)
    scores = case.scores()
    assert scores[-1].unique().numel() < 40


@pytest.mark.parametrize("name", ["plain", "bfloat"])
def test_only_what_was_chosen_is_fetched(name: str, device: str) -> None:
    case = Case(SHAPES[name], device)
    held = case.choose()
    case.ops.fetch(case.host, 0, case.buffer)
    expected = case.host.read(0, held.cpu()).to(device)
    chosen = (held >= 0)[..., None, None, None].expand_as(expected)
    assert torch.equal(case.buffer.records_BKSXCD[chosen], expected[chosen])
    assert case.buffer.records_BKSXCD[~chosen].isnan().all()


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_a_layer_is_loaded_whole(sequences: int, device: str) -> None:
    case = Case(Shape(), device)
    host = HostStore(case.shape.model, sequences, case.shape.tokens, 1, case.shape.dtype, Ledger(device))
    host.records[0].copy_(torch.randn(host.records[0].shape, generator=case.generator))
    case.ops.load(host, 0)
    for b in range(3):
        assert torch.equal(case.ops.whole_BKTXCD[b].cpu(), host.records[0][b % sequences])


@pytest.mark.parametrize("with_columns", [True, False])
@pytest.mark.parametrize("name", ["plain", "odd columns", "bfloat"])
def test_append_is_the_references(name: str, with_columns: bool, device: str) -> None:
    case = Case(SHAPES[name], device)
    s = case.shape
    fused = case.normal(s.batch, 3 * s.kv_heads, s.head_dim)
    k_BKD, v_BKD = fused.split(s.kv_heads, dim=1)[1:]
    skew = case.normal(s.batch, s.kv_heads, s.head_dim, s.columns)
    length_B = torch.tensor([s.tokens, 0, 33], device=device)
    commit_B = torch.tensor([False, True, True], device=device)
    host = HostStore(s.model, s.batch, s.tokens, 1, s.dtype, Ledger("cpu"))
    host.records[0].copy_(case.host.records[0])
    partial = case.partial.cpu().clone()
    expected = (skew.cpu(), partial) if with_columns else None
    own = (k_BKD.cpu(), v_BKD.cpu())
    ReferenceOps(5.0, 1).append(*own, host, 0, expected, length_B.cpu(), commit_B.cpu())
    got = (skew, case.partial) if with_columns else None
    case.ops.append(k_BKD, v_BKD, case.host, 0, got, length_B, commit_B)
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(case.host.records[0], host.records[0])
    # The interpreter truncates when it converts to bf16; sums of 128 products of size 4 differ in order.
    unit = torch.finfo(s.dtype).eps
    torch.testing.assert_close(case.partial.cpu(), partial, rtol=2 * unit, atol=100 * unit)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_paper_size_on_the_gpu(batch: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    check_choice(Case(Shape(batch, 8, 4, 128, 40, 122_881, 2463, 5.0, dtype), "cuda", batch))
