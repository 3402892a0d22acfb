"""The fused small operations against the PyTorch forms in fp32, and against the decoder's own layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualdecoder.config import ModelConfig, RopeConfig
from dualdecoder.errors import ConfigError
from dualdecoder.kernels.elementwise import rms_norm, rotate_queries_and_keys, swiglu
from dualdecoder.model import random_decoder
from dualdecoder.rope import rotate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*size: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, float("nan"))


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """One unit of rounding: the interpreter truncates where the GPU rounds."""
    unit = max(torch.finfo(got.dtype).eps, 1e-6)
    torch.testing.assert_close(got.float(), exact, rtol=1.01 * unit, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (6, 64), (3, 1000)])
def test_norm(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x, weight = (draw(*size, dtype=dtype, device=device) for size in ((rows, width), (width,)))
    before = x.clone()
    got = rms_norm(x, weight, 1e-5, poisoned(x))
    assert_rounded_once(got, F.rms_norm(x.float(), (width,), weight.float(), 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (7, 1, 128), (2, 1, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, device: str
) -> None:  # fmt: skip
    qkv = draw(3, 2, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    rotation = tuple(draw(3, 2, head_dim // 2, dtype=dtype, device=device, seed=seed) for seed in (3, 4))
    norms = tuple(draw(head_dim, dtype=dtype, device=device, seed=seed) for seed in (5, 6)) if normed else None
    q, k, v = (t.float() for t in qkv.split((heads, kv_heads, kv_heads), dim=2))
    if normed:
        q, k = (F.rms_norm(x, (head_dim,), w.float(), 1e-5) for x, w in zip((q, k), norms, strict=True))
    expected = torch.cat((*(rotate(x, *(t.float() for t in rotation)) for x in (q, k)), v), dim=2)
    rotate_queries_and_keys(qkv.view(3, 2, -1), rotation, heads, kv_heads, norms, 1e-5)
    # The two products may cancel: the error is relative to them, not to their sum.
    unit = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(qkv.float(), expected, rtol=2 * unit, atol=8 * unit)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_equals_the_decoder(qk_norm: bool, device: str) -> None:
    """A whole projection with a scaled YaRN rotation, and the MLP's activation."""
    rope = RopeConfig(kind="yarn", factor=4.0)
    model = random_decoder(
        ModelConfig("small", 1, 40, 56, 6, 2, 16, 32, 99, rope, qk_norm=qk_norm), torch.float32, device
    )
    layer, x = model.layers[0], draw(2, 2, 40, dtype=torch.float32, device=device)
    rotation = model.rotation(torch.tensor([[5, 6], [70, 71]], device=device))
    expected = model.project(0, x, rotation)
    normed = rms_norm(x, layer.attention_norm_E, model.config.norm_eps, poisoned(x))
    qkv = F.linear(normed, layer.qkv_QE)
    norms = (layer.q_norm_D, layer.k_norm_D) if qk_norm else None
    rotate_queries_and_keys(qkv, rotation, 6, 2, norms, model.config.norm_eps)
    q, k, v = qkv.unflatten(-1, (10, 16)).split((6, 2, 2), dim=2)
    for got, want in ((q, expected.q_BRHD), (k, expected.k_BRKD), (v, expected.v_BRKD)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 56), (5, 1500)])
def test_swiglu(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    gate_up = draw(rows, 1, 2 * width, dtype=dtype, device=device)
    got = swiglu(gate_up, poisoned(gate_up[..., :width].contiguous()))
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_rounded_once(got, F.silu(gate) * up)


def test_strided_input_is_refused(device: str) -> None:
    x = draw(4, 32, dtype=torch.float32, device=device)
    with pytest.raises(ConfigError, match="contiguous"):
        rms_norm(x[:, ::2], x[0, :16], 1e-5, x[:, :16].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_paper_size_on_the_gpu(dtype: torch.dtype) -> None:
    test_norm(96, 4096, dtype, "cuda")
    test_norm(2, 8192, dtype, "cuda")
    test_rotation(32, 8, 128, True, dtype, "cuda")
    test_swiglu(96, 14336, dtype, "cuda")
