"""Dense attention against the reference, and its commit; memory that must not be read holds NaN."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baselines.dense import ReferenceDenseAttention
from baselines.kernels.dense_attention import DEFAULT_TUNING, Cache, allocate_workspace, dense_attention, wanted_splits
from dualdecoder.attention import step_attention
from dualdecoder.config import ModelConfig
from dualdecoder.errors import ConfigError
from dualdecoder.kernels.sparse_attention import SparseAttentionWorkspace
from dualdecoder.ledger import Ledger
from dualdecoder.method import method_class, method_config

NAN = float("nan")
# Relative error of a head's output; the interpreter truncates when it converts to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """Lengths are those of the sequences; the capacity leaves room behind them."""

    lengths: tuple[int, ...] = (37, 5)
    kv_heads: int = 2
    group: int = 2
    rows: int = 2
    head_dim: int = 16
    capacity: int = 45
    dtype: torch.dtype = torch.float32
    splits: int | None = 3
    homes: int | None = None


SHAPES = {
    "plain": Shape(),
    "one row": Shape(rows=1, splits=1),
    "group of three": Shape(group=3, head_dim=32, lengths=(31, 1, 16)),
    "full tile": Shape(group=8, lengths=(64,), splits=4, capacity=65),
    "more splits than tiles": Shape(lengths=(3, 17, 40), kv_heads=1, group=1, splits=8),
    "an empty and a full sequence": Shape(lengths=(0, 45)),
    "chosen splits": Shape(lengths=(190, 3), capacity=200, splits=None),
    "half": Shape(dtype=torch.float16, head_dim=64, group=4, lengths=(150, 77), capacity=170),
    "bfloat": Shape(dtype=torch.bfloat16, head_dim=128, group=7, lengths=(90, 33), capacity=99),
    "shared home": Shape(lengths=(7, 20, 11, 30), homes=2),
}


@dataclass
class Case:
    """Inputs on the device: q, k, v as views of a fused projection, and the cache."""

    shape: Shape
    q_BRHD: Tensor
    k_BRKD: Tensor
    v_BRKD: Tensor
    cache: Cache

    def workspace(self) -> SparseAttentionWorkspace:
        s = self.shape
        ledger = Ledger(self.q_BRHD.device)
        workspace = allocate_workspace(ledger, len(s.lengths), s.kv_heads, s.head_dim, s.capacity, s.splits)
        for tensor in (workspace.partial_BKZMD, workspace.peak_BKZM, workspace.total_BKZM):
            tensor.fill_(NAN)
        return workspace

    def run(self, workspace: SparseAttentionWorkspace | None = None, tile: int | None = 16) -> Tensor:
        output = torch.full(self.q_BRHD.shape, NAN, dtype=self.shape.dtype, device=self.q_BRHD.device)
        tuning = replace(DEFAULT_TUNING, tile_tokens=tile) if tile else None
        workspace = workspace or self.workspace()
        result = dense_attention(self.q_BRHD, self.k_BRKD, self.v_BRKD, self.cache, workspace, output, tuning)
        if result.is_cuda:
            torch.cuda.synchronize()
        return result


def make_case(shape: Shape, device: str, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    batch, queries = len(shape.lengths), shape.kv_heads * shape.group
    fused = torch.randn((batch, shape.rows, queries + 2 * shape.kv_heads, shape.head_dim), generator=g)
    heads = fused.to(device, shape.dtype).split((queries, shape.kv_heads, shape.kv_heads), dim=2)
    past = torch.randn((batch, shape.kv_heads, 2, shape.capacity, shape.head_dim), generator=g).to(device, shape.dtype)
    length = torch.tensor(shape.lengths, device=device)
    commit = (torch.rand(batch, generator=g) < 0.6).to(device) & (length < shape.capacity)
    return Case(shape, *heads, Cache(past, home_of(shape, past, device), length, commit))


def home_of(shape: Shape, past: Tensor, device: str) -> Tensor:
    """The past itself, or host memory of its own filled with NaN."""
    if shape.homes is None:
        return past
    home = torch.full((shape.homes, *past.shape[1:]), NAN, dtype=shape.dtype)
    return home.pin_memory() if device == "cuda" else home


def poison(case: Case) -> None:
    """NaN behind the last token of every sequence."""
    for past, length in zip(case.cache.past_BKXPD, case.shape.lengths, strict=True):
        past[:, :, length:] = NAN


def reference(case: Case) -> Tensor:
    """fp32 attention of each sequence over exactly its own tokens."""
    outputs = []
    for b, length in enumerate(case.shape.lengths):
        own = (t[b : b + 1].float().cpu() for t in (case.q_BRHD, case.k_BRKD, case.v_BRKD))
        past = case.cache.past_BKXPD[b : b + 1, :, :, :length].float().cpu()
        outputs.append(step_attention(*own, past, torch.ones(1, case.shape.kv_heads, length, dtype=torch.bool)))
    return torch.cat(outputs)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Every head of every row on its own; NaN fails."""
    error = (got.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < TOLERANCE[got.dtype]).all(), error.max()


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference_and_reads_no_other_memory(name: str, device: str) -> None:
    case = make_case(SHAPES[name], device, seed=len(name))
    expected = reference(case)
    poison(case)
    assert_close(case.run(), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_commits_row_0_and_nothing_else(name: str, device: str) -> None:
    case = make_case(SHAPES[name], device, seed=3)
    before = case.cache.home_AKXPD.clone().cpu()
    case.run()
    for b, length in enumerate(case.shape.lengths):
        if case.cache.commit_B[b]:
            before[b % len(before), :, 0, length] = case.k_BRKD[b, 0].cpu()
            before[b % len(before), :, 1, length] = case.v_BRKD[b, 0].cpu()
    assert torch.equal(case.cache.home_AKXPD.cpu().nan_to_num(99.0), before.nan_to_num(99.0))


def test_a_full_sequence_has_no_place_for_a_token(device: str) -> None:
    case = make_case(Shape(lengths=(45, 44)), device)
    case.cache.commit_B.fill_(True)
    before = case.cache.past_BKXPD.clone()
    case.run()
    assert torch.equal(case.cache.past_BKXPD[0], before[0])
    assert torch.equal(case.cache.past_BKXPD[1, :, 0, 44], case.k_BRKD[1, 0])


def test_the_reference_commits_alike(device: str) -> None:
    by_kernel, by_reference = (make_case(Shape(homes=2), device, seed=1) for _ in range(2))
    by_kernel.run()
    c = by_reference
    home = c.cache.home_AKXPD.cpu()
    ReferenceDenseAttention(c.shape.capacity, Ledger("cpu"))(
        c.q_BRHD.cpu(), c.k_BRKD.cpu(), c.v_BRKD.cpu(), c.cache.past_BKXPD.cpu(), home,
        c.cache.length_B.cpu(), c.cache.commit_B.cpu(),
    )  # fmt: skip
    assert torch.equal(by_kernel.cache.home_AKXPD.nan_to_num(99.0), home.nan_to_num(99.0))


def test_the_workspace_can_be_used_again(device: str) -> None:
    case = make_case(Shape(), device)
    workspace = case.workspace()
    first = case.run(workspace)
    assert workspace.arrived_BK.count_nonzero() == 0
    assert torch.equal(case.run(workspace), first)


@pytest.mark.parametrize("name", ["full_kv", "full_offload"])
def test_methods_give_the_same_with_the_kernel(name: str, device: str) -> None:
    """A ragged batch over several steps, of which not every sequence commits in every one."""
    model = ModelConfig("toy", 3, 64, 64, 6, 2, 16, 64, 4096)

    def outputs(place: str, device_type: str) -> list[Tensor]:
        g, sizes = torch.Generator().manual_seed(0), {"batch": 2, "context": 40, "dtype": torch.float32}
        method = method_class(name)(model, method_config(name, {}), **sizes, device=place, planned_for=device_type)
        for b, tokens in enumerate((33, 9)):
            for layer in range(model.layers):
                tensors = (torch.randn(tokens, heads, 16, generator=g).to(place) for heads in (6, 2, 2, 2))
                method.prefill_layer(b, layer, *tensors)
        made = []
        for step in range(4):
            method.begin_step(1, torch.tensor([step != 1, step != 2], device=place))
            for layer in range(model.layers):
                q, k, v = (torch.randn(2, 1, heads, 16, generator=g).to(place) for heads in (6, 2, 2))
                made.append(method.attend(layer, q, k, v).clone().cpu())
            method.end_step()
        return made

    for got, expected in zip(outputs(device, "cuda"), outputs("cpu", "cpu"), strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize(
    ("heads", "tokens", "expected"), [(8, 124928, 64), (64, 32768, 16), (3000, 4096, 1), (1, 8, 1)]
)
def test_splits_fill_the_gpu_but_not_more(heads: int, tokens: int, expected: int) -> None:
    assert wanted_splits(heads, tokens) == expected


def test_shapes_without_a_kernel_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=r"rows \* group=18"):
        make_case(Shape(group=9), device).run()
    with pytest.raises(ConfigError, match="head_dim=24"):
        make_case(Shape(head_dim=24), device).run()


@pytest.mark.gpu
def test_pageable_home_is_refused() -> None:
    case = make_case(Shape(), "cuda")
    case.cache = case.cache._replace(home_AKXPD=case.cache.home_AKXPD.cpu())
    with pytest.raises(ConfigError, match="pinned"):
        case.run()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(5000,), (4097, 17, 3000), (1500,) * 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_paper_size_on_the_gpu(lengths: tuple[int, ...], dtype: torch.dtype, head_dim: int) -> None:
    shape = Shape(lengths, 8, 4, 2, head_dim, 5003, dtype, None)
    case = make_case(shape, "cuda", seed=len(lengths))
    case.cache.commit_B.fill_(False)
    expected = reference(case)
    poison(case)
    outputs = [case.run(tile=None) for _ in range(20)]
    assert_close(outputs[0], expected)
    assert all(torch.equal(outputs[0], other) for other in outputs)
