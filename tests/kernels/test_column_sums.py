"""Column sums in tiles against PyTorch in blocks."""

import pytest
import torch

from baselines import h2o
from baselines.kernels.column_sums import column_sums
from dualdecoder.errors import ConfigError

# tokens, query heads, KV heads, head size, dtype
CASES = [
    (1, 2, 1, 16, torch.float32),
    (97, 6, 2, 32, torch.float32),
    (200, 2, 2, 64, torch.float16),
    (161, 4, 1, 128, torch.bfloat16),
    (128, 4, 2, 16, torch.bfloat16),
]


def check(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    fused = (torch.randn(tokens, heads + kv_heads, head_dim, generator=generator) * 1.5).to(dtype).to(device)
    q_THD, k_TKD = fused.split((heads, kv_heads), dim=1)
    expected, got = h2o.column_sums(q_THD, k_TKD), column_sums(q_THD, k_TKD)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert float(got.sum(dtype=torch.float64)) == pytest.approx(tokens * heads, rel=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: tuple, device: str) -> None:
    check(*case, device)


def test_a_head_size_without_a_kernel_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="head_dim=24"):
        check(5, 2, 1, 24, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4096, 5001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_paper_size_on_the_gpu(tokens: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    check(tokens, 32, 8, 128, dtype, "cuda")
