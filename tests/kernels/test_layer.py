"""A layer with fused kernels against the decoder's own in fp32."""

import pytest
import torch
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.kernels import layer
from dualdecoder.model import Decoder, random_decoder

# Relative error of a whole tensor; the interpreter truncates when it converts to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# (sequences, rows)
SIZES = [(1, 1), (1, 2), (9, 2), (17, 1)]
KINDS = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}


def make_model(kind: str, dtype: torch.dtype, device: str) -> Decoder:
    """Weights large enough for the layer to change the residual stream, and norms that are not all ones."""
    config = ModelConfig("small", 1, 80, 112, 6, 2, 16, 32, 99, **KINDS[kind])
    model, generator = random_decoder(config), torch.Generator().manual_seed(3)
    for name, weight in vars(model.layers[0]).items():
        if weight is not None:
            weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator) if "norm" in name else 8)
    return model.to(device, dtype)


def draw(*size: int, like: Decoder, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


def wide(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.cpu().float() for t in tensors)


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    error = (got.float().cpu() - expected).norm() / expected.norm()
    assert error < TOLERANCE[got.dtype], error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("batch", "rows"), SIZES)
def test_projection(batch: int, rows: int, dtype: torch.dtype, kind: str, device: str) -> None:
    model = make_model(kind, dtype, device)
    x = draw(batch, rows, 80, like=model, seed=1)
    rotation = model.rotation(torch.arange(batch * rows, device=device).view(batch, rows) * 7)
    expected = model.to("cpu", torch.float32).project(0, *wide((x,)), wide(rotation))
    before = x.clone()
    got = layer.project(model.config, model.layers[0], x, rotation)
    for tensor, wanted in zip(got, (expected.q_BRHD, expected.k_BRKD, expected.v_BRKD), strict=True):
        assert_close(tensor, wanted)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("batch", "rows"), SIZES)
def test_rest_of_the_layer(batch: int, rows: int, dtype: torch.dtype, device: str) -> None:
    model = make_model("llama", dtype, device)
    x, o = draw(batch, rows, 80, like=model, seed=1), draw(batch, rows, 6, 16, like=model, seed=2)
    expected = model.to("cpu", torch.float32).finish_layer(0, *wide((x, o)))
    got = layer.finish_layer(model.config, model.layers[0], x, o)
    assert_close(got, expected)
    # No copy of the residual stream is made.
    assert got is x
