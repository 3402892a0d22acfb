"""All kernels put together: Quest and OasisKV through Triton give what their references give, step by step."""

import pytest
import torch

from baselines.blocks import BlockMethod
from baselines.oasiskv import OasisKV, OasisKVConfig
from baselines.quest import Quest, QuestConfig
from dualdecoder.config import ModelConfig

# The interpreter warns of guesses between infinities in the search for a cut.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPE = ModelConfig("three-layers", 3, 8, 8, 6, 2, 16, 16, 4096)
PROMPTS = (150, 9)


class TritonQuest(Quest):
    """The kernels on whatever device there is: a GPU, or the interpreter."""

    def _make_ops(self):
        return self.triton_ops()


class TritonOasisKV(OasisKV):
    """The kernels on whatever device there is: a GPU, or the interpreter."""

    def _make_ops(self):
        return self.triton_ops()

    def _make_admission(self):
        return self.triton_admission()


def assert_same_steps(reference: BlockMethod, kernels: BlockMethod, device: str) -> None:
    torch.manual_seed(0)
    for b, tokens in enumerate(PROMPTS):
        for layer in range(3):
            q, k, v = torch.randn(tokens, 6, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
            for method in (reference, kernels):
                method.prefill_layer(b, layer, *(t.to(method.ledger.device) for t in (q, k, k, v)))
    for commit in [[False, False], *[[True, True]] * 10, [True, False], [False, True], [True, True]]:
        rows = reference.rows if any(commit) else 1
        q, k, v = torch.randn(2, rows, 6, 16), torch.randn(2, rows, 2, 16), torch.randn(2, rows, 2, 16)
        outputs = []
        for method in (reference, kernels):
            place = method.ledger.device
            method.begin_step(rows, torch.tensor(commit, device=place))
            outputs.append([method.attend(i, q.to(place), k.to(place), v.to(place)).cpu().clone() for i in range(3)])
            method.end_step()
        for expected, got in zip(*outputs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        for expected, got in zip(reference.layers, kernels.layers, strict=True):
            assert torch.equal(got.bounds_BKNYD.cpu(), expected.bounds_BKNYD)
    assert torch.equal(kernels.chunks_B.cpu(), reference.chunks_B)
    assert reference.chunks_B.tolist() == [(150 + 12) // 16, (9 + 12) // 16]
    assert kernels.read_bytes() == reference.read_bytes()


@pytest.mark.parametrize("dense_layers", [0, 1])
def test_quest(device: str, dense_layers: int) -> None:
    config, sizes = QuestConfig(budget=64, dense_layers=dense_layers), {"batch": 2, "context": 200}
    reference, kernels = (
        made(SHAPE, config, **sizes, dtype=torch.float32, device=place)
        for made, place in ((Quest, "cpu"), (TritonQuest, device))
    )
    assert not kernels.ops.top_workspace.shared
    assert_same_steps(reference, kernels, device)
    for expected, got in zip(reference.pages, kernels.pages, strict=True):
        assert torch.equal(got.cpu(), expected)


def test_oasiskv(device: str) -> None:
    config, sizes = OasisKVConfig(budget=96, fetch_ratio=0.4), {"batch": 2, "context": 200}
    reference, kernels = (
        made(SHAPE, config, **sizes, dtype=torch.float32, device=place)
        for made, place in ((OasisKV, "cpu"), (TritonOasisKV, device))
    )
    # Its selection has other kernels beside it; Quest's has not.
    assert kernels.ops.top_workspace.shared
    assert_same_steps(reference, kernels, device)
    assert kernels.statistics() == reference.statistics()
    assert reference.statistics()["admitted"] > 0
    for expected, got in zip(reference.resident, kernels.resident, strict=True):
        assert torch.equal(got.buffer.held_BKS.cpu(), expected.buffer.held_BKS)
        assert torch.equal(got.used_BKS.cpu(), expected.used_BKS)
        assert torch.equal(got.buffer.records_BKSXCD.cpu(), expected.buffer.records_BKSXCD)
    for layer in range(3):
        assert torch.equal(kernels.host.records[layer].cpu(), reference.host.records[layer])


def test_long_lists_get_one_wave_of_programs() -> None:
    from baselines.kernels.blocks import wanted_splits

    assert wanted_splits(heads=8, blocks=7625) == 49
    assert wanted_splits(heads=16, blocks=7625) == 24
    assert wanted_splits(heads=64, blocks=7625) is None
    assert wanted_splits(heads=8, blocks=153) is None
