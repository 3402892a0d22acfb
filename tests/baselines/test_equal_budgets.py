"""At their defaults all sparse methods attend to equally many tokens, and to as many as they say."""

import pytest
import torch

from dualdecoder.config import DualDecoderConfig, ModelConfig
from dualdecoder.method import REGISTRY, KVMethod, method_class, method_config

# 128K, and its tokens: selected, outliers, local.
ATTENDED = 2464
# Long enough for any budget and, like 128K, a multiple of every chunk and page.
PROMPT = 8192
# Methods of pages, whose last one, always attended, holds the row itself: here it is its page's last token.
PAGED = {"quest": PROMPT + 15, "oasiskv": PROMPT + 15}
# Methods whose number includes the row itself.
COUNT_ITSELF = {*PAGED, "infinigen"}
MODEL = ModelConfig("toy", 4, 64, 64, 4, 2, 16, 64, 131072)
SPARSE = [name for name in REGISTRY if hasattr(method_config(name, {}), "attended_tokens")]


@pytest.mark.parametrize("name", SPARSE)
def test_defaults_attend_to_equally_many_tokens(name: str) -> None:
    assert method_config(name, {}).attended_tokens == ATTENDED


@pytest.mark.parametrize("name", SPARSE)
def test_a_row_attends_to_as_many_tokens_as_are_named(name: str) -> None:
    """With a query of zeros every attended token has the same weight, so the weight of the row itself counts them."""
    config = method_config(name, {})
    method = method_class(name)(MODEL, config, batch=1, context=PROMPT + 32, dtype=torch.float32)
    prefill(method, PAGED.get(name, PROMPT))
    if method.rows == 2:
        weight_of_itself(method, 1)
    itself_LH = weight_of_itself(method, method.rows)
    # The first layers of some methods attend to everything.
    attended_H = 1 / itself_LH[-1] - int(name not in COUNT_ITSELF)
    assert attended_H.tolist() == pytest.approx([config.attended_tokens] * MODEL.query_heads, abs=0.01)


def prefill(method: KVMethod, prompt: int) -> None:
    """Values of zero: nothing of the past is in the output."""
    g = torch.Generator().manual_seed(0)
    for layer in range(MODEL.layers):
        q_THD, k_TKD = (torch.randn(prompt, heads, MODEL.head_dim, generator=g) for heads in (4, 2))
        method.prefill_layer(0, layer, q_THD, k_TKD, k_TKD, torch.zeros_like(k_TKD))


def weight_of_itself(method: KVMethod, rows: int) -> torch.Tensor:
    """A step of zero queries whose own value is one, not committed; row 0's outputs, by layer and query head."""
    q_1RHD, k_1RKD = (torch.zeros(1, rows, heads, MODEL.head_dim) for heads in (4, 2))
    method.begin_step(rows, torch.zeros(1, dtype=torch.bool))
    outputs = []
    for layer in range(MODEL.layers):
        if method.foresees and layer + 1 < MODEL.layers:
            method.foresee(layer + 1, q_1RHD)
        outputs.append(method.attend(layer, q_1RHD, k_1RKD, torch.ones_like(k_1RKD))[0, 0, :, 0].clone())
    method.end_step()
    return torch.stack(outputs)


def test_the_number_follows_the_settings() -> None:
    """768 selected, 18 outlier chunks of 8, 64 local."""
    assert DualDecoderConfig(budget=768, local=64, window=96).attended_tokens == 768 + 144 + 64
