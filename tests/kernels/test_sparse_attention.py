"""Sparse attention against gathering everything and calling the reference; memory that must not be read holds NaN."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dualdecoder.attention import step_attention
from dualdecoder.errors import ConfigError
from dualdecoder.kernels.sparse_attention import (
    DEFAULT_TUNING,
    Places,
    SparseAttentionWorkspace,
    sparse_attention,
    wanted_splits,
)
from dualdecoder.ledger import Ledger

NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    rows: int = 2
    head_dim: int = 16
    selected: int = 5
    slots: int = 7
    outliers: int = 3
    chunk: int = 4
    window: int = 12
    dtype: torch.dtype = torch.float32
    splits: int | None = 3

    @property
    def past(self) -> int:
        return (self.selected + self.outliers) * self.chunk + self.window


# Relative error of a head's output; the interpreter truncates when it converts to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = {
    "plain": Shape(),
    "one row": Shape(rows=1, splits=1),
    "group of three": Shape(group=3, head_dim=32),
    "full tile": Shape(batch=1, group=8, chunk=8, window=24, selected=9, slots=9, splits=5),
    "more splits than tiles": Shape(batch=3, kv_heads=1, group=1, selected=1, slots=1, outliers=1, splits=8),
    "no outlier places": Shape(outliers=0, splits=None),
    "half": Shape(dtype=torch.float16, head_dim=64, chunk=8, window=64, group=4, rows=2),
    "bfloat": Shape(dtype=torch.bfloat16, head_dim=128, chunk=8, window=32, group=7, selected=11, slots=20),
    "chunk of one": Shape(chunk=1, window=5, selected=30, slots=31),
}


@dataclass
class Case:
    """Inputs on the device: q, k, v as views of a fused projection, and where the past lies."""

    shape: Shape
    q_BRHD: Tensor
    k_BRKD: Tensor
    v_BRKD: Tensor
    places: Places

    def workspace(self, splits: int | None = None) -> SparseAttentionWorkspace:
        s = self.shape
        ledger = Ledger(self.q_BRHD.device)
        splits = splits or s.splits
        workspace = SparseAttentionWorkspace.allocate(ledger, s.batch, s.kv_heads, s.head_dim, s.past, splits)
        for tensor in (workspace.partial_BKZMD, workspace.peak_BKZM, workspace.total_BKZM):
            tensor.fill_(NAN)
        return workspace

    def run(
        self, rows: int | None = None, workspace: SparseAttentionWorkspace | None = None, tile: int | None = 16
    ) -> Tensor:
        output = torch.full(self.q_BRHD.shape, NAN, dtype=self.shape.dtype, device=self.q_BRHD.device)
        tuning = replace(DEFAULT_TUNING, tile_tokens=tile) if tile else None
        return sparse_attention(
            self.q_BRHD, self.k_BRKD, self.v_BRKD, self.places, workspace or self.workspace(), output, tuning
        )


def make_case(shape: Shape, device: str, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g).to(shape.dtype)

    def with_holes(entries: int) -> Tensor:
        chunk = torch.randint(0, 1000, (*lead, entries), generator=g)
        return chunk.masked_fill(torch.rand(chunk.shape, generator=g) < 0.3, -1)

    lead, record = (shape.batch, shape.kv_heads), (2, shape.chunk, shape.head_dim)
    queries = shape.kv_heads * shape.group
    fused = normal(shape.batch, shape.rows, queries + 2 * shape.kv_heads, shape.head_dim).to(device)
    slot = torch.rand((*lead, shape.slots), generator=g).argsort(-1)[..., : shape.selected].int()
    filled = torch.randint(0, shape.window + 1, (shape.batch,), generator=g)
    start = torch.randint(0, 9, (shape.batch,), generator=g) * shape.chunk
    places = Places(
        normal(*lead, shape.slots, *record), slot, with_holes(shape.selected), normal(*lead, shape.outliers, *record),
        with_holes(shape.outliers), normal(*lead, 2, shape.window, shape.head_dim), start, start + filled,
    )  # fmt: skip
    heads = fused.split((queries, shape.kv_heads, shape.kv_heads), dim=2)
    return Case(shape, *heads, Places(*(t.contiguous().to(device) for t in places[:-1])))


def gathered(case: Case) -> tuple[Tensor, Tensor]:
    """Past [B, K, 2, P, D] in fp32 and which of it is allowed, by loops over places and positions."""
    s, p = case.shape, case.places
    past = torch.zeros(s.batch, s.kv_heads, 2, s.past, s.head_dim)
    allowed = torch.zeros(s.batch, s.kv_heads, s.past, dtype=torch.bool)
    records, outliers, window = p.records_BKVXCD.cpu(), p.outlier_records_BKOXCD.cpu(), p.window_BKXWD.cpu()
    for b in range(s.batch):
        for k in range(s.kv_heads):
            found = [
                records[b, k, slot] if chosen >= 0 else None
                for slot, chosen in zip(p.slot_BKS[b, k].tolist(), p.chosen_BKS[b, k].tolist(), strict=True)
            ]
            found += [outliers[b, k, o] if n >= 0 else None for o, n in enumerate(p.outlier_BKO[b, k].tolist())]
            for place, record in enumerate(found):
                span = slice(place * s.chunk, (place + 1) * s.chunk)
                if record is not None:
                    past[b, k, :, span], allowed[b, k, span] = record.float(), True
            for position in range(int(p.start_B[b]), int(p.length_B[b])):
                at = len(found) * s.chunk + position % s.window
                past[b, k, :, at], allowed[b, k, at] = window[b, k, :, position % s.window].float(), True
    return past, allowed


def poison(case: Case, allowed: Tensor) -> None:
    """NaN in every slot, outlier place and window slot that is not allowed."""
    s, p = case.shape, case.places
    allowed = allowed.to(p.records_BKVXCD.device)
    chunks, window = allowed.split(((s.selected + s.outliers) * s.chunk, s.window), dim=2)
    exists = chunks.unflatten(2, (-1, s.chunk))[..., 0]
    used = torch.zeros(p.records_BKVXCD.shape[:3], dtype=torch.bool, device=allowed.device)
    used.scatter_(2, p.slot_BKS.long(), exists[..., : s.selected])
    p.records_BKVXCD[~used] = NAN
    p.outlier_records_BKOXCD[~exists[..., s.selected :]] = NAN
    p.window_BKXWD.transpose(2, 3)[~window] = NAN


def reference(case: Case) -> Tensor:
    own = (t.float().cpu() for t in (case.q_BRHD, case.k_BRKD, case.v_BRKD))
    return step_attention(*own, *gathered(case))


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Every head of every row on its own; NaN fails."""
    error = (got.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < TOLERANCE[got.dtype]).all(), error.max()


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference_and_reads_no_masked_memory(name: str, device: str) -> None:
    case = make_case(SHAPES[name], device, seed=len(name))
    expected = reference(case)
    poison(case, gathered(case)[1])
    assert_close(case.run(), expected)


def test_an_empty_past_leaves_the_step_itself(device: str) -> None:
    case = make_case(Shape(), device)
    case.places.chosen_BKS.fill_(-1), case.places.outlier_BKO.fill_(-1)
    case.places.length_B.copy_(case.places.start_B)
    for tensor in (case.places.records_BKVXCD, case.places.outlier_records_BKOXCD, case.places.window_BKXWD):
        tensor.fill_(NAN)
    own_BHD = case.v_BRKD[:, 0].repeat_interleave(case.shape.group, dim=1)
    torch.testing.assert_close(case.run()[:, 0], own_BHD, atol=1e-6, rtol=1e-6)


def test_where_the_chunks_lie_changes_no_bit(device: str) -> None:
    case = make_case(Shape(dtype=torch.float16, chunk=8, head_dim=64), device)
    first = case.run()
    p = case.places
    move = torch.rand(p.records_BKVXCD.shape[:3], generator=torch.Generator().manual_seed(5)).argsort(-1).to(device)
    moved = torch.full_like(p.records_BKVXCD, NAN)
    moved.scatter_(2, move[..., None, None, None].expand_as(moved), p.records_BKVXCD)
    slot_BKS = move.gather(2, p.slot_BKS.long()).int()
    case.places = p._replace(records_BKVXCD=moved, slot_BKS=slot_BKS)
    assert torch.equal(case.run(), first)


def test_the_workspace_can_be_used_again(device: str) -> None:
    case = make_case(Shape(), device)
    workspace = case.workspace()
    first = case.run(workspace=workspace)
    assert workspace.arrived_BK.count_nonzero() == 0
    assert torch.equal(case.run(workspace=workspace), first)


def test_row_0_of_a_selection_needs_no_copy(device: str) -> None:
    case = make_case(Shape(batch=3), device)
    first = case.run()
    sets_BRKS = torch.stack((case.places.chosen_BKS, torch.full_like(case.places.chosen_BKS, -1)), dim=1)
    case.places = case.places._replace(chosen_BKS=sets_BRKS[:, 0])
    assert torch.equal(case.run(), first)


def test_chunks_without_a_slot_are_read_from_the_host_store(device: str) -> None:
    """Bit by bit what the buffer gives. Two sequences share a host sequence, and so their chunks and records."""
    case = make_case(Shape(batch=2, dtype=torch.float16, chunk=8, head_dim=64), device)
    p, shape = case.places, case.shape
    for tensor in (p.records_BKVXCD, p.slot_BKS, p.chosen_BKS):
        tensor[1] = tensor[0]
    p.chosen_BKS.copy_(torch.arange(shape.selected, 0, -1).expand(p.chosen_BKS.shape))
    expected = case.run()
    host = torch.full((1, shape.kv_heads, shape.selected + 1, 2, shape.chunk, shape.head_dim), NAN, dtype=torch.float16)
    slot_BKS, records_BKVXCD = p.slot_BKS.clone(), p.records_BKVXCD.clone()
    for k in range(shape.kv_heads):
        for s in range(0, shape.selected, 2):
            host[0, k, p.chosen_BKS[0, k, s]] = records_BKVXCD[0, k, slot_BKS[0, k, s]].cpu()
            records_BKVXCD[:, k, slot_BKS[0, k, s]] = NAN
    slot_BKS[..., ::2] = -1
    host = host.pin_memory() if device == "cuda" else host
    case.places = p._replace(slot_BKS=slot_BKS, records_BKVXCD=records_BKVXCD, host_AKNXCD=host)
    assert torch.equal(case.run(), expected)


@pytest.mark.parametrize(("heads", "tokens", "expected"), [(8, 2496, 16), (128, 2496, 4), (3000, 2496, 1), (1, 8, 1)])
def test_splits_fill_the_gpu_but_not_more(heads: int, tokens: int, expected: int) -> None:
    assert wanted_splits(heads, tokens) == expected


def test_shapes_without_a_kernel_are_refused(device: str) -> None:
    case = make_case(Shape(group=9), device)
    with pytest.raises(ConfigError, match=r"rows \* group=18"):
        case.run()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_paper_size_on_the_gpu(batch: int, dtype: torch.dtype) -> None:
    shape = Shape(batch, 8, 4, 2, 128, 256, 300, 48, 8, 64, dtype, None)
    case = make_case(shape, "cuda", seed=batch)
    expected = reference(case)
    poison(case, gathered(case)[1])
    outputs = [case.run(tile=None) for _ in range(20)]
    assert_close(outputs[0], expected)
    assert all(torch.equal(outputs[0], other) for other in outputs)
