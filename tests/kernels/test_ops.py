"""All kernels put together: a decode through TritonOps gives what ReferenceOps gives, step by step."""

import pytest
import torch

from dualdecoder.config import DualDecoderConfig, ModelConfig
from dualdecoder.dual import DualDecoder

SHAPE = ModelConfig("two-layers", 2, 8, 8, 6, 2, 16, 16, 4096)
PROMPTS = (150, 97)


class TritonDualDecoder(DualDecoder):
    """The kernels on whatever device there is: a GPU, or the interpreter."""

    def _make_ops(self):
        return self.triton_ops()


@pytest.mark.parametrize(("speculation", "urgent"), [("self", "gather"), ("none", "gather"), ("self", "in_place")])
def test_steps_match_the_reference(device: str, speculation: str, urgent: str) -> None:
    config = DualDecoderConfig(budget=32, window=48, speculation=speculation, urgent=urgent)
    sizes = {"batch": len(PROMPTS), "context": 200, "dtype": torch.float32}
    reference, kernels = DualDecoder(SHAPE, config, **sizes), TritonDualDecoder(SHAPE, config, **sizes, device=device)
    torch.manual_seed(0)
    for b, tokens in enumerate(PROMPTS):
        for layer in range(2):
            q, k, v = torch.randn(tokens, 6, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
            for method in (reference, kernels):
                method.prefill_layer(b, layer, *(t.to(method.ledger.device) for t in (q, k, k, v)))
    commits = [[False, False], *[[True, True]] * 10, [True, False], [True, True]]
    for commit in commits:
        rows = 1 if not any(commit) else reference.rows
        q, k, v = torch.randn(2, rows, 6, 16), torch.randn(2, rows, 2, 16), torch.randn(2, rows, 2, 16)
        outputs = []
        for method in (reference, kernels):
            place = method.ledger.device
            method.begin_step(rows, torch.tensor(commit, device=place))
            outputs.append([method.attend(i, q.to(place), k.to(place), v.to(place)).cpu().clone() for i in range(2)])
            method.end_step()
        for expected, got in zip(*outputs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        for layer in range(2):
            assert torch.equal(kernels.selected[layer].cpu(), reference.selected[layer])
            assert torch.equal(kernels.predicted[layer].cpu(), reference.predicted[layer])
    assert kernels.telemetry.per_layer() == reference.telemetry.per_layer()
    assert torch.equal(kernels.chunks_B.cpu(), reference.chunks_B)
    assert (reference.chunks_B > torch.tensor([(tokens - 32) // 8 for tokens in PROMPTS])).any(), "nothing was flushed"
    for layer in range(2):
        torch.testing.assert_close(kernels.host.records[layer].cpu(), reference.host.records[layer])
        torch.testing.assert_close(
            kernels.layers[layer].landmarks_BKND.cpu(), reference.layers[layer].landmarks_BKND, rtol=1e-5, atol=1e-6
        )
