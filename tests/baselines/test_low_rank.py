"""The factorisation against a full singular value decomposition, and rotation against the model's own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.low_rank import LowRankKeys, Rotation, factorise
from dualdecoder.config import ModelConfig, RopeConfig
from dualdecoder.ledger import Ledger
from dualdecoder.model import random_decoder
from dualdecoder.rope import rotate
from dualdecoder.shapes import SHAPES


def truncated(keys: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(keys.astype(np.float64), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 90), columns=st.integers(1, 40), rank=st.integers(1, 40), decay=st.floats(0, 2),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_the_product_is_the_truncated_svd(tokens: int, columns: int, rank: int, decay: float, seed: int) -> None:
    rank = min(rank, columns)
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((tokens, columns)) * np.arange(1, columns + 1) ** -decay
    left, right = factorise(torch.tensor(keys), rank)
    assert left.shape == (tokens, rank)
    assert right.shape == (rank, columns)
    np.testing.assert_allclose((left @ right).numpy(), truncated(keys, rank), atol=1e-6)


def test_sigma_is_in_the_right_factor() -> None:
    keys = torch.randn(200, 24, generator=torch.Generator().manual_seed(0))
    left, right = factorise(keys, 10)
    torch.testing.assert_close(left.T @ left, torch.eye(10, dtype=left.dtype))
    torch.testing.assert_close(right.norm(dim=1), torch.linalg.svdvals(keys.double())[:10])


def test_fewer_tokens_than_columns_and_keys_of_zeros() -> None:
    keys = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    left, right = factorise(keys, 24)
    torch.testing.assert_close(left @ right, keys.double())
    left, right = factorise(torch.zeros(50, 8), 4)
    assert torch.equal(left @ right, torch.zeros(50, 8, dtype=left.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen2.5-14b"])
def test_the_table_holds_the_models_cosines_and_sines_to_the_last_bit(shape: str, dtype: torch.dtype) -> None:
    model = replace(SHAPES[shape], layers=1, vocabulary=8)
    expected = random_decoder(model, dtype).rotation(torch.arange(131072)[None])
    table_TZP = Rotation.of(model, 131072, dtype, Ledger("cpu")).table_TZP
    assert torch.equal(table_TZP, torch.stack([part[0] for part in expected], dim=1))


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_full_rank_gives_back_the_models_keys(kind: str) -> None:
    """Keys rotated by the model come back from the factors of keys before rotation, at every position."""
    rope = RopeConfig(kind=kind, factor=1.0 if kind == "default" else 4.0, original_context=64)
    shape = ModelConfig("shape", 2, 24, 40, 6, 3, 10, 50, 4096, rope)
    keys_TKD = torch.randn(200, 3, 10, generator=torch.Generator().manual_seed(1))
    expected_TKD = rotate(keys_TKD[None], *random_decoder(shape).rotation(torch.arange(200)[None]))[0]
    ledger = Ledger("cpu")
    sizes = {"batch": 2, "chunks": 30, "chunk": 4, "rank": 999, "dtype": torch.float32, "ledger": ledger}
    keys = LowRankKeys.allocate(shape, Rotation.of(shape, 120, torch.float32, ledger), **sizes)
    assert keys.rank == 30
    keys.write_prompt(1, keys_TKD, 25)
    chunk_BKS = torch.tensor([24, 0, 7, 13]).expand(2, 3, 4)
    got_KSCD = keys.rebuilt(chunk_BKS)[1]
    torch.testing.assert_close(
        got_KSCD, expected_TKD.unflatten(0, (50, 4)).permute(2, 0, 1, 3)[:, chunk_BKS[0, 0]], rtol=1e-4, atol=1e-5
    )
    assert keys.left_BNCU[1, 25:].abs().sum() == keys.left_BNCU[0].abs().sum() == 0, "only its own rows are written"
