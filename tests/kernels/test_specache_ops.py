"""All SpeCache kernels put together: a decode through TritonOps gives what ReferenceOps gives, step by step."""

import pytest
import torch

from baselines.specache import SpeCache, SpeCacheConfig
from dualdecoder.config import ModelConfig

SHAPE = ModelConfig("three-layers", 3, 8, 8, 3, 1, 16, 16, 4096)
PROMPTS = (94, 62)


class TritonSpeCache(SpeCache):
    """The kernels on whatever device there is: a GPU, or the interpreter."""

    def _make_ops(self):
        return self.triton_ops()


@pytest.mark.parametrize("bits", [1, 2])
def test_steps_match_the_reference(device: str, bits: int) -> None:
    config = SpeCacheConfig(bits=bits, group=16, top=12)
    sizes = {"batch": len(PROMPTS), "context": 101, "dtype": torch.float32}
    reference, kernels = SpeCache(SHAPE, config, **sizes), TritonSpeCache(SHAPE, config, **sizes, device=device)
    torch.manual_seed(0)
    for b, tokens in enumerate(PROMPTS):
        for layer in range(SHAPE.layers):
            q, k, v = torch.randn(tokens, 3, 16), torch.randn(tokens, 1, 16), torch.randn(tokens, 1, 16)
            for method in (reference, kernels):
                method.prefill_layer(b, layer, *(t.to(method.ledger.device) for t in (q, k, k, v)))
    commits = [[False, False], *[[True, True]] * 3, [True, False], [True, True]]
    for commit in commits:
        rows = 1 if not any(commit) else reference.rows
        q, k, v = 2 * torch.randn(2, rows, 3, 16), torch.randn(2, rows, 1, 16), torch.randn(2, rows, 1, 16)
        for method in (reference, kernels):
            method.begin_step(rows, torch.tensor(commit, device=method.ledger.device))
        for layer in range(SHAPE.layers):
            expected, got = (
                method.attend(layer, *(t.to(method.ledger.device) for t in (q, k, v))).cpu()
                for method in (reference, kernels)
            )
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        reference.end_step(), kernels.end_step()
        for now, then in zip(kernels.layers, reference.layers, strict=True):
            assert torch.equal(now.chosen_BKS.cpu(), then.chosen_BKS)
    assert kernels.telemetry.per_layer() == reference.telemetry.per_layer()
    assert kernels.statistics()["reused"] > 0
    assert (reference.length_B // 16 > torch.tensor(PROMPTS) // 16).all(), "no group was completed"
    for now, then, host, records in zip(
        kernels.layers, reference.layers, kernels.host.records, reference.host.records, strict=True
    ):
        torch.testing.assert_close(now.pairs.records_BKSXCD.cpu(), then.pairs.records_BKSXCD)
        torch.testing.assert_close(now.cache.dequantised().cpu(), then.cache.dequantised(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(now.cache.ring_BKXWD.cpu(), then.cache.ring_BKXWD, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(host.cpu(), records)
