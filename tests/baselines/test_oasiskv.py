"""OasisKV against a simulation from the definition: resident sets, outputs, traffic; and against full KV."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from baselines.oasiskv import OasisKV, OasisKVConfig
from dualdecoder.config import ModelConfig
from dualdecoder.engine import Engine
from tests.baselines.block_reference import (
    BLOCK,
    Layer,
    ResidentSet,
    attention,
    best_blocks,
    fill,
    tokens_of,
    walk,
)

SHAPE = ModelConfig("two-layers", 2, 8, 8, 6, 2, 16, 16, 4096)


def first_sets(method: OasisKV, layers: list[Layer], prompt: int) -> dict[tuple[int, int], ResidentSet]:
    """Resident set of every layer and KV head after the prompt."""
    sets = {}
    for number, layer in enumerate(layers):
        for head in range(layer.k_TKD.shape[1]):
            q_TGD, keys, _ = layer.of_head(head)
            best = best_blocks(q_TGD[prompt - 1], keys, prompt // BLOCK, method.slots)
            sets[number, head] = ResidentSet.first(best, method.slots, prompt - 1)
    return sets


def check_walk(method: OasisKV, layers: list[Layer], prompt: int, tolerance: float) -> int:
    """Every step of every layer and head against the simulation; returns how many blocks it brought in."""
    sets = first_sets(method, layers, prompt)
    admitted = 0
    for position, outputs in walk(method, layers, prompt):
        for (number, head), resident in sets.items():
            q_TGD, keys, values = layers[number].of_head(head)
            blocks = [block for block in resident.slots if block is not None]
            past = tokens_of(blocks) + list(range(position // BLOCK * BLOCK, position))
            for row in range(2):
                seen = past + list(range(position, position + row + 1))
                for g, q_D in enumerate(q_TGD[position + row]):
                    got = outputs[number][0, row, head * q_TGD.shape[1] + g].numpy()
                    assert_allclose(got, attention(q_D, keys, values, seen), rtol=tolerance, atol=tolerance)
            assert len(past) < method.config.attended_tokens
            predicted = best_blocks(q_TGD[position + 1], keys, (position + 1) // BLOCK, method.slots)
            admitted += len(resident.admit(predicted, method.config.cap, position))
            held = [None if n < 0 else n for n in method.resident[number].buffer.held_BKS[0, head].tolist()]
            assert held == resident.slots
    return admitted


@pytest.mark.parametrize("prompt", [1, 15, 64, 250])
@pytest.mark.parametrize(("budget", "ratio"), [(32, 0.05), (112, 0.4), (112, 1.0)])
def test_resident_sets_and_outputs(prompt: int, budget: int, ratio: float) -> None:
    torch.manual_seed(prompt)
    layers = [Layer.random(prompt + 60, 6, 2, 16) for _ in range(2)]
    config = OasisKVConfig(budget=budget, fetch_ratio=ratio)
    method = OasisKV(SHAPE, config, batch=1, context=prompt + 60, dtype=torch.float32)
    admitted = check_walk(method, layers, prompt, 1e-4)
    statistics = method.statistics()
    assert statistics["admitted"] == admitted > 0
    assert statistics["urgent_bytes"] == 0
    assert statistics["prefetched_bytes"] == admitted * 2 * BLOCK * 16 * 4
    assert 0 < statistics["agreement"] <= 1


def test_resident_sets_and_outputs_on_real_tensors(smollm2: Engine, manual) -> None:
    snapshot = smollm2.prefill(manual(430))
    layers = [Layer(q, k, v) for q, _, k, v in (snapshot.layers[i] for i in (0, 14))]
    model = ModelConfig("two-layers", 2, 8, 8, 9, 3, 64, 16, 4096)
    method = OasisKV(model, OasisKVConfig(budget=128, fetch_ratio=0.2), batch=1, context=430, dtype=torch.float32)
    assert check_walk(method, layers, 390, 2e-4) > 0


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3), budget=st.sampled_from([32, 64]),
    seed=st.integers(0, 99), masks=st.lists(st.integers(0, 7), min_size=25, max_size=25),
)  # fmt: skip
def test_a_batch_is_its_sequences_and_uncommitted_rows_leave_no_trace(lengths, budget, seed, masks) -> None:
    torch.manual_seed(seed)
    texts = [[Layer.random(length + 30, 6, 2, 16) for _ in range(2)] for length in lengths]
    sizes = {"context": max(lengths) + 30, "dtype": torch.float32}
    batch = OasisKV(SHAPE, OasisKVConfig(budget=budget), batch=len(lengths), **sizes)
    alone = [OasisKV(SHAPE, batch.config, batch=1, **sizes) for _ in lengths]
    for b, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        fill(batch, text, length, b)
        fill(alone[b], text, length)
    place = list(lengths)
    for mask in masks:
        commit = [bool(mask >> b & 1) for b in range(len(lengths))]
        # A step of nobody is one row, as a pre-decode is.
        rows = 2 if any(commit) else 1
        batch.begin_step(rows, torch.tensor(commit))
        for layer in range(2):
            given = [
                [t[p : p + rows] for t in vars(text[layer]).values()] for text, p in zip(texts, place, strict=True)
            ]
            mixed = [[t if c else t + 9 for t in r] for r, c in zip(given, commit, strict=True)]
            output = batch.attend(layer, *(torch.stack(t) for t in zip(*mixed, strict=True)))
            for b in (b for b, c in enumerate(commit) if c):
                if layer == 0:
                    alone[b].begin_step(2, torch.tensor([True]))
                expected = alone[b].attend(layer, *(t[None] for t in given[b]))
                torch.testing.assert_close(output[b : b + 1], expected, rtol=1e-5, atol=1e-6)
        batch.end_step()
        for b in (b for b, c in enumerate(commit) if c):
            alone[b].end_step()
            place[b] += 1
    for b, one in enumerate(alone):
        for layer in range(2):
            held_BKS = batch.resident[layer].buffer.held_BKS
            assert torch.equal(held_BKS[b], one.resident[layer].buffer.held_BKS[0])
    assert batch.statistics()["admitted"] == sum(one.statistics()["admitted"] for one in alone)


def test_equals_full_kv_when_all_blocks_are_resident(tiny: Engine, random_ids) -> None:
    """Generated blocks, too, become resident as they fill."""
    prompts = [random_ids(n, n) for n in (130, 64, 5)]
    expected = tiny.generate(prompts, 60)
    assert tiny.with_method("oasiskv", budget=208).generate(prompts, 60) == expected
    assert tiny.with_method("oasiskv", budget=48).generate(prompts, 60) != expected


def test_a_needle_beyond_the_tail_is_found_once_it_is_admitted() -> None:
    """The needle answers the queries from position 895 on; those before look the other way."""
    torch.manual_seed(3)
    layers = [Layer.random(900, 6, 2, 16) for _ in range(2)]
    for layer in layers:
        asked_KD = torch.nn.functional.normalize(torch.randn(2, 16), dim=-1)
        layer.q_THD[889:895] = -asked_KD.repeat_interleave(3, dim=0)
        layer.q_THD[895:] = 12 * asked_KD.repeat_interleave(3, dim=0)
        layer.k_TKD[37], layer.v_TKD[37] = 8 * asked_KD, 50.0
    method = OasisKV(SHAPE, OasisKVConfig(budget=64), batch=1, context=900, dtype=torch.float32)
    fill(method, layers, 890)
    assert not any((resident.buffer.held_BKS == 37 // BLOCK).any() for resident in method.resident)
    found = {position: min(o[0, 0].min() for o in outputs) for position, outputs in walk(method, layers, 890)}
    assert all(output < 20 for position, output in found.items() if position < 895)
    # Row 1 of the step at 894 foresaw it.
    assert all(output > 40 for position, output in found.items() if position >= 895)


def test_a_replaced_prediction_decides_what_is_resident() -> None:
    torch.manual_seed(0)
    layers = [Layer.random(400, 6, 2, 16) for _ in range(2)]
    method = OasisKV(SHAPE, OasisKVConfig(budget=80, fetch_ratio=0.5), batch=1, context=400, dtype=torch.float32)
    forced_BKS = torch.tensor([20, 3, 11, 7]).expand(1, 2, 4)
    calls = []

    def force(layer, chosen_BKS, predicted_BKS):
        calls.append(torch.equal(chosen_BKS, predicted_BKS))
        return chosen_BKS, forced_BKS

    method.rewrite = force
    for _ in walk(method, layers, 396):
        pass
    assert calls == [True] * 6
    for resident in method.resident:
        assert all(set(head) == {3, 7, 11, 20} for head in resident.buffer.held_BKS[0].tolist())


def test_sequences_may_share_host_memory() -> None:
    """As for a benchmark whose host memory is too short."""
    config = OasisKVConfig(budget=48, host_sequences=1)
    method = OasisKV(SHAPE, config, batch=3, context=400, dtype=torch.float32)
    method.fill_synthetic(350)
    assert len(method.host.records[0]) == 1
    assert method.chunks_B.tolist() == [21] * 3
    token = 2 * 2 * 16 * 4
    assert method.read_bytes() == 2 * 3 * token * (21 + 2 * BLOCK + 350 % BLOCK)
