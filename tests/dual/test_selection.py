"""One layer of DualDecoder against a dense re-computation from the definition, for prompt and generated tokens."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from dualdecoder.config import DualDecoderConfig, ModelConfig
from dualdecoder.dual import DualDecoder

SHAPE = ModelConfig("two-layers", 2, 8, 8, 6, 2, 16, 16, 4096)
CHUNK = 8


def attended_tokens(
    keys_TD: np.ndarray, q_GD: np.ndarray, config: DualDecoderConfig, prompt: int, flushed: int
) -> tuple[set[int], list[int]]:
    """Past token positions that one KV head's rows attend to, and the selected chunks."""
    chunks = max(0, (prompt - config.local) // CHUNK) + flushed
    of_prompt = chunks - flushed
    members = [keys_TD[n * CHUNK : (n + 1) * CHUNK] for n in range(chunks)]
    means = [m.mean(axis=0) for m in members]
    worst = [
        min(k @ mean / np.linalg.norm(k) / np.linalg.norm(mean) for k in m)
        for m, mean in zip(members, means, strict=True)
    ]
    outliers = sorted(range(of_prompt), key=lambda n: worst[n])[: config.outliers]
    candidates = [n for n in range(chunks) if n not in outliers]
    best = dict.fromkeys(candidates, 0.0)
    for q in q_GD:
        exps = {n: math.exp(q @ means[n] / math.sqrt(q.size)) for n in candidates}
        for n in candidates:
            best[n] = max(best[n], exps[n] / sum(exps.values()))
    chosen = sorted(candidates, key=lambda n: -best[n])[: config.budget // CHUNK]
    in_chunks = {t for n in [*chosen, *outliers] for t in range(n * CHUNK, (n + 1) * CHUNK)}
    return in_chunks | set(range(chunks * CHUNK, len(keys_TD))), sorted(chosen)


@pytest.mark.parametrize("prompt", [33, 47, 200, 325])
@pytest.mark.parametrize("budget", [8, 64])
def test_selection_and_output(prompt: int, budget: int) -> None:
    torch.manual_seed(prompt)
    config = DualDecoderConfig(budget=budget, window=56)
    new = 60
    method = DualDecoder(SHAPE, config, batch=1, context=prompt + new, dtype=torch.float32)
    k_TKD, v_TKD = torch.randn(2, prompt + new, 2, 16)
    for layer in range(2):
        method.prefill_layer(0, layer, torch.randn(prompt, 6, 16), k_TKD[:prompt], k_TKD[:prompt], v_TKD[:prompt])
    for position in range(prompt, prompt + new - 1):
        q_BRHD = torch.randn(1, 2, 6, 16)
        rows = slice(position, position + 2)
        method.begin_step(2, torch.tensor([True]))
        outputs = [method.attend(layer, q_BRHD, k_TKD[None, rows], v_TKD[None, rows]) for layer in range(2)]
        flushed = int(method.chunks_B) - max(0, (prompt - 32) // CHUNK)
        method.end_step()
        check_step(config, method, q_BRHD, k_TKD, v_TKD, outputs[0], position, prompt, flushed)
        assert_allclose(outputs[0].numpy(), outputs[1].numpy(), rtol=1e-6)
    # The window holds 56 tokens; the rest of prompt and new tokens must have gone to the host by then.
    assert int(method.length_B) - int(method.chunks_B) * CHUNK <= 56


def check_step(config, method, q_BRHD, k_TKD, v_TKD, output_BRHD, position: int, prompt: int, flushed: int) -> None:
    for head in range(2):
        keys, values = k_TKD[:, head].double().numpy(), v_TKD[:, head].double().numpy()
        q_RGD = q_BRHD[0, :, 3 * head : 3 * head + 3].double().numpy()
        tokens, chosen = attended_tokens(keys[:position], q_RGD[0], config, prompt, flushed)
        assert [c for c in method.selected[0][0, head].tolist() if c >= 0] == chosen
        _, predicted = attended_tokens(keys[:position], q_RGD[1], config, prompt, flushed)
        assert [c for c in method.predicted[0][0, head].tolist() if c >= 0] == predicted
        for row, g in np.ndindex(2, 3):
            seen = sorted(tokens) + list(range(position, position + row + 1))
            weights = np.exp(keys[seen] @ q_RGD[row, g] / 4)
            expected = weights @ values[seen] / weights.sum()
            assert_allclose(output_BRHD[0, row, 3 * head + g].numpy(), expected, rtol=1e-4, atol=1e-5)
