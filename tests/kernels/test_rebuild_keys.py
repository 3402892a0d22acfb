"""The fused rebuild of keys against gather, product and rotation in PyTorch; then whole ShadowKV steps."""

import pytest
import torch
from fetch_lists import fetch_list

from baselines.kernels.rebuild_keys import rebuild_keys
from baselines.low_rank import LowRankKeys, Rotation
from baselines.shadowkv import ShadowKV, ShadowKVConfig
from dualdecoder.config import ModelConfig, RopeConfig
from dualdecoder.errors import ConfigError
from dualdecoder.ledger import Ledger

YARN = RopeConfig(kind="yarn", factor=4.0, original_context=256)
# One rounding of the result in 16 bits; the order of fp32 sums otherwise.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def factors(
    batch: int, heads: int, head_dim: int, chunks: int, chunk: int, rank: int, dtype: torch.dtype, device: str = "cpu"
) -> LowRankKeys:
    shape = ModelConfig("shape", 2, 8, 8, heads, heads, head_dim, 16, 4096, YARN)
    ledger = Ledger(device)
    sizes = {"batch": batch, "chunks": chunks, "chunk": chunk, "rank": rank, "dtype": dtype, "ledger": ledger}
    return LowRankKeys.allocate(shape, Rotation.of(shape, chunks * chunk, dtype, ledger), **sizes)


def check(
    keys: LowRankKeys, slots: int, count: int, device: str, *, grouped: bool = True, programs: int = 3, seed: int = 0
) -> None:
    """Rebuild ``count`` chunks into random slots; all other memory keeps its NaN."""
    generator = torch.Generator().manual_seed(seed)
    keys.left_BNCU.normal_(generator=generator)
    keys.right_BKUD.normal_(std=keys.rank**-0.5, generator=generator)
    batch, heads = keys.right_BKUD.shape[:2]
    places = torch.randperm(batch * heads * slots, generator=generator)[:count]
    places = (places.sort().values if grouped else places).tolist()
    numbers = torch.randint(keys.left_BNCU.shape[1], (count,), generator=generator).tolist()
    entries = [(place // slots, n, place % slots) for place, n in zip(places, numbers, strict=True)]
    chunk_BKS = torch.full((batch, heads, slots), -1)
    for head, n, slot in entries:
        chunk_BKS[head // heads, head % heads, slot] = n
    rebuilt_BKSCD = keys.rebuilt(chunk_BKS)
    records_BKSXCD = torch.full((*rebuilt_BKSCD.shape[:3], 2, *rebuilt_BKSCD.shape[3:]), torch.nan)
    records_BKSXCD = records_BKSXCD.to(device, rebuilt_BKSCD.dtype)
    rotation = Rotation(keys.rotation.table_TZP.to(device))
    moved = LowRankKeys(keys.left_BNCU.to(device), keys.right_BKUD.to(device), rotation)
    rebuild_keys(moved, fetch_list(entries, device), records_BKSXCD, programs=programs)
    got_BKSCD, values_BKSCD = records_BKSXCD.cpu().unbind(dim=3)
    assert values_BKSCD.isnan().all()
    listed_BKS = chunk_BKS >= 0
    assert got_BKSCD[~listed_BKS].isnan().all()
    tolerance = TOLERANCE[got_BKSCD.dtype]
    torch.testing.assert_close(got_BKSCD[listed_BKS], rebuilt_BKSCD[listed_BKS], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("head_dim", "rank"), [(64, 160), (128, 160), (16, 32), (20, 7), (128, 1)])
def test_every_dtype_head_size_and_rank(dtype: torch.dtype, head_dim: int, rank: int, device: str) -> None:
    check(factors(2, 3, head_dim, 11, 8, rank, dtype), 5, 17, device)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
@pytest.mark.parametrize("programs", [1, 2, 40])
def test_lists_of_any_length(count: int, programs: int, device: str) -> None:
    check(factors(2, 3, 32, 9, 8, 24, torch.float32), 5, count, device, programs=programs)


@pytest.mark.parametrize("chunk", [1, 2, 4, 16, 64, 128])
def test_every_chunk_size(chunk: int, device: str) -> None:
    check(factors(2, 2, 32, 5, chunk, 20, torch.float32), 3, 10, device)


def test_heads_may_come_in_any_order(device: str) -> None:
    check(factors(3, 2, 16, 9, 8, 24, torch.float32), 6, 30, device, grouped=False)


def test_chunks_that_are_no_power_of_two_are_refused(device: str) -> None:
    keys = factors(1, 1, 16, 3, 6, 8, torch.float32, device)
    with pytest.raises(ConfigError, match="chunk=6"):
        rebuild_keys(keys, fetch_list([], device), torch.zeros(1, 1, 2, 2, 6, 16, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [64, 264])
def test_full_size(programs: int) -> None:
    check(factors(2, 8, 128, 16384, 8, 160, torch.bfloat16), 256, 1700, "cuda", programs=programs)


@pytest.mark.gpu
def test_a_million_tokens() -> None:
    """Rows of the factors and of the table that are far away."""
    check(factors(1, 1, 64, 131072, 8, 32, torch.float32), 64, 64, "cuda", programs=8)


class TritonShadowKV(ShadowKV):
    """The kernels on whatever device there is: a GPU, or the interpreter."""

    def _make_ops(self, sequences: slice):
        return self.triton_ops(sequences)

    def _make_rebuild(self):
        return self.triton_rebuild()


@pytest.mark.parametrize(("parts", "host_sequences"), [(1, 0), (2, 0), (3, 2)])
def test_steps_match_the_reference(parts: int, host_sequences: int, device: str) -> None:
    shape, prompts = ModelConfig("two-layers", 2, 8, 8, 6, 2, 16, 16, 4096), (150, 97, 30)
    config = ShadowKVConfig(budget=32, rank=20, generated=20, parts=parts, host_sequences=host_sequences)
    sizes = {"batch": len(prompts), "context": 180, "dtype": torch.float32}
    methods = (ShadowKV(shape, config, **sizes), TritonShadowKV(shape, config, **sizes, device=device))
    reference, kernels = methods
    torch.manual_seed(0)
    for b, tokens in enumerate(prompts):
        for layer in range(2):
            tensors = [torch.randn(tokens, heads, 16) for heads in (6, 2, 2, 2)]
            for method in methods:
                method.prefill_layer(b, layer, *(t.to(method.ledger.device) for t in tensors))
    for commit in ([True, True, False], [True, False, True], [True, True, True], [False, False, False]):
        # As the model gives them: views of one fused projection.
        q, k, v = torch.randn(len(prompts), 1, 10, 16).split((6, 2, 2), dim=2)
        outputs = []
        for method in methods:
            place = method.ledger.device
            method.begin_step(1, torch.tensor(commit, device=place))
            outputs.append([method.attend(i, q.to(place), k.to(place), v.to(place)).cpu().clone() for i in range(2)])
            method.end_step()
        for expected, got in zip(*outputs, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        for layer in range(2):
            assert torch.equal(kernels.selected[layer].cpu(), reference.selected[layer])
            assert torch.equal(kernels.buffers[layer].held_BKS.cpu(), reference.buffers[layer].held_BKS)
    assert kernels.telemetry.per_layer() == reference.telemetry.per_layer()
    assert 0 < reference.statistics()["hit"] < reference.statistics()["selected"]
    for layer in range(2):
        for name in ("window_BKXWD", "landmarks_BKND"):
            got, expected = (getattr(method.layers[layer], name).cpu() for method in (kernels, reference))
            torch.testing.assert_close(got, expected)
