"""Split attention over a dense store against the reference; places that must not be read hold NaN."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baselines.kernels.ring_attention import Append, RingWorkspace, attend_splits, merge_splits, wanted_splits
from dualdecoder.attention import step_attention
from dualdecoder.errors import ConfigError
from dualdecoder.kernels.online_softmax import LOG2_E
from dualdecoder.ledger import Ledger

NAN = float("nan")
# Relative error of a head's output; the interpreter truncates when it converts to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    batch: int = 3
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    places: int = 77
    dtype: torch.dtype = torch.float32
    splits: int = 3
    records: bool = False  # K and V of a place side by side, as in a host record


SHAPES = {
    "plain": Shape(),
    "one split": Shape(splits=1),
    "group of three": Shape(group=3, head_dim=32, splits=5),
    "no group": Shape(group=1, places=5, splits=9),
    "records": Shape(records=True, places=130, splits=4),
    "half": Shape(dtype=torch.float16, head_dim=64, group=4, places=200, splits=0),
    "bfloat": Shape(dtype=torch.bfloat16, head_dim=128, group=8, places=150, records=True),
}


class Case:
    """q, k, v as views of a fused projection, the store, and how much of it is filled (from nothing to all)."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        queries, s = shape.kv_heads * shape.group, shape
        fused = torch.randn(s.batch, 1, queries + 2 * s.kv_heads, s.head_dim, generator=g).to(s.dtype).to(device)
        self.shape, self.device = shape, device
        self.own = fused.split((queries, s.kv_heads, s.kv_heads), dim=2)
        kv_BKXPD = torch.randn(s.batch, s.kv_heads, 2, s.places, s.head_dim, generator=g).to(s.dtype).to(device)
        self.filled_B = torch.randint(0, s.places + 1, (s.batch,), generator=g)
        self.filled_B[0], self.filled_B[-1] = 0, s.places
        self.filled_B = self.filled_B.to(device)
        self.past_BKXPD = kv_BKXPD
        filled_BP = torch.arange(s.places, device=device) < self.filled_B[:, None]
        self.filled_BKP = filled_BP[:, None].expand(-1, s.kv_heads, -1)
        poisoned = kv_BKXPD.masked_fill(~filled_BP[:, None, None, :, None], NAN)
        self.store = poisoned.transpose(2, 3).contiguous().transpose(2, 3) if s.records else poisoned

    def run(self, to: Append | None = None, keep_logits: bool = False) -> Tensor:
        s = self.shape
        sizes = (s.batch, s.kv_heads * s.group, s.kv_heads, s.head_dim, s.places, keep_logits, s.splits)
        self.workspace = RingWorkspace.allocate(Ledger(self.device), *sizes)
        for tensor in vars(self.workspace).values():
            if tensor is not None:
                tensor.fill_(NAN)
        past = self.store.unbind(2)
        attend_splits(self.own[0], *past, self.filled_B, self.workspace)
        output = torch.full(self.own[0].shape, NAN, dtype=s.dtype, device=self.device)
        return merge_splits(*self.own, *past, self.workspace, output, to)

    def reference(self) -> Tensor:
        own = (t.float() for t in self.own)
        return step_attention(*own, self.past_BKXPD.float(), self.filled_BKP)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Every head on its own; NaN fails."""
    error = (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < TOLERANCE[got.dtype]).all(), error.max()


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference_and_reads_no_empty_place(name: str, device: str) -> None:
    case = Case(SHAPES[name], device, seed=len(name))
    assert_close(case.run(), case.reference())


@pytest.mark.parametrize("name", ["plain", "records", "bfloat"])
def test_the_row_goes_where_it_is_told(name: str, device: str) -> None:
    case = Case(SHAPES[name], device)
    place_B = torch.tensor([2, 0, 4], device=device)
    commit_B = torch.tensor([True, False, True], device=device)
    expected, output = case.store.clone(), case.reference()
    for b in (0, 2):
        expected[b, :, :, place_B[b]] = torch.stack((case.own[1][b, 0], case.own[2][b, 0]), dim=1)
    assert_close(case.run(Append(place_B, commit_B)), output)
    assert torch.equal(case.store.nan_to_num(7), expected.nan_to_num(7))


def test_logits_of_filled_places_are_kept(device: str) -> None:
    case = Case(SHAPES["group of three"], device)
    case.run(keep_logits=True)
    q_BKGD = case.own[0][:, 0].unflatten(1, (case.shape.kv_heads, -1)).float()
    logits_BKGP = q_BKGD @ case.past_BKXPD[:, :, 0].float().transpose(-1, -2) * case.shape.head_dim**-0.5 * LOG2_E
    got_BKGP = case.workspace.logits_BHP.unflatten(1, (case.shape.kv_heads, -1))
    filled = case.filled_BKP[:, :, None].expand_as(got_BKGP)
    torch.testing.assert_close(got_BKGP[filled], logits_BKGP[filled], atol=1e-4, rtol=1e-4)
    assert got_BKGP[~filled].isnan().all()


def test_the_same_twice(device: str) -> None:
    case = Case(SHAPES["half"], device)
    assert torch.equal(case.run(), case.run())


@pytest.mark.parametrize(("heads", "places", "splits"), [(8, 2464, 39), (8, 122880, 64), (192, 2464, 2), (999, 9, 1)])
def test_splits_fill_the_gpu_but_not_more(heads: int, places: int, splits: int) -> None:
    assert wanted_splits(heads, places) == splits


@pytest.mark.parametrize(("shape", "field"), [(Shape(group=17), "query heads"), (Shape(head_dim=24), "head_dim")])
def test_shapes_without_a_kernel_are_refused(shape: Shape, field: str, device: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Case(shape, device).run()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("places", [2464, 20_001])
def test_paper_size_on_the_gpu(batch: int, dtype: torch.dtype, places: int) -> None:
    case = Case(Shape(batch, 8, 4, 128, places, dtype, 0), "cuda", seed=batch)
    assert_close(case.run(), case.reference())
