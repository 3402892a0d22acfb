"""Selection of a batch, whole or in halves, against the reference."""

import pytest
import torch

from dualdecoder.config import ModelConfig
from dualdecoder.kernels.selection import Selection
from dualdecoder.landmarks import chunk_scores, top_chunks
from dualdecoder.ledger import Ledger
from dualdecoder.ops import LayerState
from dualdecoder.shapes import SHAPES

MODEL = ModelConfig("small", 1, 8, 8, 4, 2, 16, 16, 4096)


def state_of(batch: int, chunks: int, device: str) -> LayerState:
    generator = torch.Generator().manual_seed(batch)
    landmarks_BKND = torch.randn(batch, 2, chunks, 16, generator=generator)
    outliers_BKO = torch.rand(batch, 2, chunks, generator=generator).argsort(-1)[..., :3]
    chunks_B = torch.randint(chunks // 2, chunks + 1, (batch,), generator=generator)
    empty = torch.empty(0)
    tensors = (landmarks_BKND, outliers_BKO.contiguous(), empty, empty, chunks_B * 8, chunks_B)
    return LayerState(*(t.to(device) for t in tensors))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("batch", "halved"), [(5, False), (5, True), (6, True), (1, True)])
def test_sets_are_those_of_the_reference(batch: int, halved: bool, rows: int, device: str) -> None:
    chunks, count = 150, 9
    state = state_of(batch, chunks, device)
    q_BRHD = torch.randn(batch, rows, 4, 16, generator=torch.Generator().manual_seed(1)).to(device)
    selection = Selection(Ledger(device), MODEL, batch=batch, rows=2, chunks=chunks, count=count, halved=halved)
    for _ in range(2):
        sets_BRKS = torch.full((batch, rows, 2, count), -777, dtype=torch.int64, device=device)
        selection(q_BRHD, state, sets_BRKS)
        scores = chunk_scores(q_BRHD, state.landmarks_BKND, state.chunks_B, state.outliers_BKO)
        assert torch.equal(sets_BRKS, top_chunks(scores, count))


def test_only_large_batches_are_halved() -> None:
    sizes = {"rows": 2, "chunks": 16384, "count": 256}
    parts = [Selection(Ledger("meta"), SHAPES["llama-3.1-8b"], batch=b, **sizes).parts for b in (1, 8, 25)]
    assert [[p.sequences for p in part] for part in parts] == [
        [slice(0, 1)], [slice(0, 8)], [slice(0, 13), slice(13, 25)],
    ]  # fmt: skip
