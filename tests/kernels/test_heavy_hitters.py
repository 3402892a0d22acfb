"""An H2O step in Triton against the same step in PyTorch: output, scores, and which place is given up.

Empty places and workspaces hold NaN or nonsense.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baselines.h2o import H2O, H2OConfig
from dualdecoder.config import ModelConfig
from dualdecoder.errors import ConfigError

NONSENSE = 1 << 40


@dataclass(frozen=True)
class Shape:
    heavy: int = 20
    recent: int = 17
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    batch: int = 4
    # Scores are whole numbers from 1: with few, the least is shared and the oldest token that has it must go.
    levels: int = 3

    @property
    def places(self) -> int:
        return self.heavy + self.recent


SHAPES = {
    "plain": Shape(),
    "nothing heavy but one": Shape(heavy=1, recent=30),
    "newest only": Shape(heavy=30, recent=1, group=1),
    "group of three": Shape(group=3, head_dim=32),
    "half": Shape(150, 90, dtype=torch.float16, head_dim=64, group=4),
    "bfloat": Shape(80, 80, dtype=torch.bfloat16, head_dim=128, group=8),
}


def filled_method(shape: Shape, device: str, with_kernels: bool, seed: int) -> H2O:
    """Sequences 0 and 1 are full, 2 is nearly empty, 3 lacks one token. The row of sequence 1 is not committed."""
    s, g = shape, torch.Generator().manual_seed(seed)
    model = ModelConfig("m", 1, 8, 8, s.kv_heads * s.group, s.kv_heads, s.head_dim, 8, 1 << 20)
    sizes = {"batch": s.batch, "context": 10_000, "dtype": s.dtype, "device": device}
    method = H2O(model, H2OConfig(s.heavy, s.recent), **sizes, planned_for="cuda" if with_kernels else None)
    length_B = torch.tensor([s.places + 900, s.places, 1, s.places - 1])
    position_BKP = torch.full((s.batch, s.kv_heads, s.places), NONSENSE)
    for b, length in enumerate(length_B.tolist()):
        kept = min(length, s.places)
        newest = torch.arange(max(length - s.recent, 0), length)
        for k in range(s.kv_heads):
            older = torch.randperm(max(length - s.recent, 0), generator=g)[: kept - len(newest)]
            both = torch.cat((newest, older))
            position_BKP[b, k, :kept] = both[torch.randperm(kept, generator=g)]
    empty_BKP = position_BKP == NONSENSE
    kv = torch.randn(method.kv_LBKXPD.shape[1:], generator=g).to(s.dtype)
    score = torch.randint(1, s.levels + 1, position_BKP.shape, generator=g).float()
    unread = (torch.nan, NONSENSE) if with_kernels else (0.0, 0)
    method.kv_LBKXPD[0] = kv.masked_fill(empty_BKP[:, :, None, :, None], unread[0]).to(device)
    method.score_LBKP[0] = score.masked_fill(empty_BKP, unread[0]).to(device)
    method.position_LBKP[0] = position_BKP.masked_fill(empty_BKP, unread[1]).to(device)
    method.length_B.copy_(length_B)
    if with_kernels:
        for tensor in (*vars(method.workspace).values(), method.o_BRHD):
            tensor.fill_(torch.nan)
    return method


def step(method: H2O, shape: Shape, seed: int, zero_queries: bool) -> Tensor:
    s, g = shape, torch.Generator().manual_seed(seed)
    fused = torch.randn(s.batch, 1, s.kv_heads * (s.group + 2), s.head_dim, generator=g)
    q, k, v = fused.to(s.dtype).to(method.ledger.device).split((s.kv_heads * s.group, s.kv_heads, s.kv_heads), dim=2)
    commit_B = torch.tensor([True, False, True, True], device=q.device).repeat(-(-s.batch // 4))[: s.batch]
    method.begin_step(1, commit_B)
    return method.attend(0, torch.zeros_like(q) if zero_queries else q, k, v).float().cpu()


def check(shape: Shape, device: str, seed: int, zero_queries: bool = False) -> None:
    methods = [filled_method(shape, *how, seed) for how in (("cpu", False), (device, True))]
    outputs = [step(method, shape, seed, zero_queries) for method in methods]
    error = (outputs[1] - outputs[0]).norm(dim=-1) / outputs[0].norm(dim=-1)
    # The interpreter truncates when it converts to bf16.
    assert (error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[shape.dtype]).all()
    filled_B = (methods[0].length_B + torch.tensor([1, 0, 1, 1])).clamp(max=shape.places)
    holds_BKP = (methods[0].place_P < filled_B[:, None])[:, None].expand(-1, shape.kv_heads, -1)
    expected, got = (
        (m.position_LBKP[0].cpu()[holds_BKP], m.score_LBKP[0].cpu()[holds_BKP], m.kv_LBKXPD[0].cpu()) for m in methods
    )
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)
    both_BXKP = holds_BKP[:, None].expand(-1, 2, -1, -1)
    assert torch.equal(got[2].transpose(1, 2)[both_BXKP], expected[2].transpose(1, 2)[both_BXKP])
    assert got[2].transpose(1, 2)[~both_BXKP].isnan().all()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_equals_the_reference_and_reads_no_empty_place(name: str, seed: int, device: str) -> None:
    check(SHAPES[name], device, seed)


@pytest.mark.parametrize("seed", range(3))
def test_of_equal_scores_the_oldest_goes(seed: int, device: str) -> None:
    """Queries of zero give all tokens the same; with 31 of them and itself, 1/32 is exact, and so are the sums."""
    check(Shape(heavy=16, recent=15), device, seed, zero_queries=True)


def test_more_places_than_a_program_holds_are_refused(device: str) -> None:
    shape = Shape(heavy=9_000, recent=9_000, kv_heads=1, group=1, batch=1)
    model = ModelConfig("m", 1, 8, 8, 1, 1, 16, 8, 1 << 20)
    sizes = {"batch": 1, "context": 20_000, "dtype": torch.float32, "device": device}
    method = H2O(model, H2OConfig(shape.heavy, shape.recent), **sizes, planned_for="cuda")
    with pytest.raises(ConfigError, match="heavy \\+ recent=18000"):
        step(method, shape, 0, zero_queries=False)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_paper_size_on_the_gpu(dtype: torch.dtype, seed: int) -> None:
    # Many levels: the least of 1233 scores is then not decided by rounding.
    check(Shape(1232, 1232, 8, 4, 128, dtype, levels=10**6), "cuda", seed)
