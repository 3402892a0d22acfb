"""Quest against a dense re-computation from the definition, and against full KV where they are the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from baselines.quest import Quest, QuestConfig
from baselines.summaries import key_bounds
from dualdecoder.config import ModelConfig
from dualdecoder.engine import Engine
from dualdecoder.selection_replay import ReplayConfig, replay_selection
from tests.baselines.block_reference import BLOCK, Layer, attention, best_blocks, fill, tokens_of, walk

SHAPE = ModelConfig("three-layers", 3, 8, 8, 6, 2, 16, 16, 4096)


def recorded(method: Quest) -> list[tuple[int, torch.Tensor]]:
    """Layer and chosen pages of every selection that the method makes from now on."""
    seen: list[tuple[int, torch.Tensor]] = []

    def keep(layer: int, chosen_BKS: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((layer, chosen_BKS.clone()))
        return chosen_BKS, chosen_BKS

    method.rewrite = keep
    return seen


def check_walk(method: Quest, layers: list[Layer], prompt: int, tolerance: float) -> None:
    chosen = recorded(method)
    for position, outputs in walk(method, layers, prompt):
        first = position // BLOCK * BLOCK
        selections = {number: pages for number, pages in chosen if number >= method.config.dense_layers}
        assert [number for number, _ in chosen] == list(range(len(layers)))
        chosen.clear()
        for number, layer in enumerate(layers):
            for head in range(layer.k_TKD.shape[1]):
                q_TGD, keys, values = layer.of_head(head)
                pages = range(position // BLOCK)
                if number in selections:
                    pages = best_blocks(q_TGD[position], keys, position // BLOCK, method.config.blocks)
                    found = [n for n in selections[number][0, head].tolist() if n >= 0]
                    assert found == sorted(pages)
                seen = tokens_of(pages) + list(range(first, position + 1))
                assert len(seen) <= method.config.attended_tokens or number not in selections
                for g, q_D in enumerate(q_TGD[position]):
                    got = outputs[number][0, 0, head * q_TGD.shape[1] + g].numpy()
                    assert_allclose(got, attention(q_D, keys, values, seen), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("prompt", [1, 16, 47, 200])
@pytest.mark.parametrize(("budget", "dense_layers"), [(32, 0), (96, 2)])
def test_selection_and_output(prompt: int, budget: int, dense_layers: int) -> None:
    torch.manual_seed(prompt)
    layers = [Layer.random(prompt + 40, 6, 2, 16) for _ in range(3)]
    config = QuestConfig(budget=budget, dense_layers=dense_layers)
    method = Quest(SHAPE, config, batch=1, context=prompt + 40, dtype=torch.float32)
    check_walk(method, layers, prompt, 1e-4)


def test_selection_and_output_on_real_tensors(smollm2: Engine, manual) -> None:
    snapshot = smollm2.prefill(manual(330))
    layers = [Layer(q, k, v) for q, _, k, v in (snapshot.layers[i] for i in (0, 7, 14, 29))]
    model = ModelConfig("four-layers", 4, 8, 8, 9, 3, 64, 16, 4096)
    method = Quest(model, QuestConfig(budget=80), batch=1, context=330, dtype=torch.float32)
    check_walk(method, layers, 310, 2e-4)


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3), budget=st.sampled_from([32, 48]),
    seed=st.integers(0, 99), masks=st.lists(st.integers(0, 7), min_size=20, max_size=20),
)  # fmt: skip
def test_a_batch_is_its_sequences_and_uncommitted_rows_leave_no_trace(lengths, budget, seed, masks) -> None:
    torch.manual_seed(seed)
    texts = [[Layer.random(length + 20, 6, 2, 16) for _ in range(3)] for length in lengths]
    sizes = {"context": max(lengths) + 20, "dtype": torch.float32}
    batch = Quest(SHAPE, QuestConfig(budget=budget, dense_layers=1), batch=len(lengths), **sizes)
    alone = [Quest(SHAPE, batch.config, batch=1, **sizes) for _ in lengths]
    for b, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        fill(batch, text, length, b)
        fill(alone[b], text, length)
    place = list(lengths)
    for mask in masks:
        commit_B = torch.tensor([bool(mask >> b & 1) for b in range(len(lengths))])
        batch.begin_step(1, commit_B)
        for layer in range(3):
            rows = [[t[layer].q_THD, t[layer].k_TKD, t[layer].v_TKD] for t in texts]
            # Rows that are not committed hold something else, which must not be seen later.
            mixed = [[t[p] if c else t[p] + 9 for t in r] for r, p, c in zip(rows, place, commit_B, strict=True)]
            output = batch.attend(layer, *(torch.stack(t)[:, None] for t in zip(*mixed, strict=True)))
            for b in commit_B.nonzero().flatten().tolist():
                if layer == 0:
                    alone[b].begin_step(1, torch.tensor([True]))
                expected = alone[b].attend(layer, *(t[place[b]][None, None] for t in rows[b]))
                torch.testing.assert_close(output[b : b + 1], expected, rtol=1e-5, atol=1e-6)
        batch.end_step()
        for b in commit_B.nonzero().flatten().tolist():
            alone[b].end_step()
            place[b] += 1
    assert batch.lengths.length_B.tolist() == place


def test_equals_full_kv_with_a_covering_budget(tiny: Engine, random_ids) -> None:
    prompts = [random_ids(n, n) for n in (130, 64, 5)]
    expected = tiny.generate(prompts, 40)
    assert tiny.with_method("quest", budget=176).generate(prompts, 40) == expected
    assert tiny.with_method("quest", budget=48).generate(prompts, 40) != expected


def test_all_layers_dense_is_full_kv(tiny: Engine, random_ids) -> None:
    prompts = [random_ids(n, n) for n in (130, 64, 5)]
    assert tiny.with_method("quest", budget=32, dense_layers=4).generate(prompts, 40) == tiny.generate(prompts, 40)


def test_a_needle_beyond_the_last_page_is_found() -> None:
    torch.manual_seed(3)
    layers = [Layer.random(900, 6, 2, 16) for _ in range(3)]
    for layer in layers:
        layer.k_TKD[37] = 3 * torch.nn.functional.normalize(layer.q_THD[899].unflatten(0, (2, 3))[:, 0], dim=-1) * 4
        layer.v_TKD[37] = 50.0
    method = Quest(SHAPE, QuestConfig(budget=64), batch=1, context=900, dtype=torch.float32)
    outputs = dict(walk(method, layers, 890))[899]
    assert all(output[0, 0, [0, 3]].min() > 40 for output in outputs)


def test_read_bytes_is_what_the_step_attends_to_and_scores() -> None:
    method = Quest(SHAPE, QuestConfig(budget=64, dense_layers=1), batch=2, context=300, dtype=torch.float32)
    for sequence, length in enumerate((200, 21)):
        fill(method, [Layer.random(length, 6, 2, 16) for _ in range(3)], length, sequence)
    token = 2 * 2 * 16 * 4
    dense, scored = 221, (12 + 1) + (3 * BLOCK + 8) + (BLOCK + 5)
    assert method.read_bytes() == token * (dense + 2 * scored)


def test_a_replayed_selection_moves_once_a_step_though_a_layer_is_dense() -> None:
    method = Quest(SHAPE, QuestConfig(budget=64, dense_layers=1), batch=2, context=600, dtype=torch.float32)
    method.fill_synthetic(500)
    replay = replay_selection(method, ReplayConfig(reuse=1 / 3, accuracy=1.0))
    for _ in range(4):
        method.begin_step(1, torch.tensor([True, True]))
        for layer in range(3):
            assert method.attend(layer, *(torch.randn(2, 1, heads, 16) for heads in (6, 2, 2))).isfinite().all()
        method.end_step()
    assert int(replay.step) == 4


def test_a_group_merged_by_its_sum_keeps_more_attention_than_by_its_largest_bound(smollm2: Engine, manual) -> None:
    """And less than a set of each query head, as it must. Positions of a real text; layers that select."""
    kept: dict[str, list[float]] = {"largest": [], "sum": [], "per head": []}
    for q_THD, _, k_TKD, _ in smollm2.prefill(manual(1024)).layers[2:]:
        for position in (600, 800, 1000):
            for head, keys_PD in enumerate(k_TKD[: position + 1].unbind(1)):
                q_GD = q_THD[position].unflatten(0, (k_TKD.shape[1], -1))[head]
                mass_GN, tail_G = page_mass(q_GD, keys_PD)
                low_ND, high_ND = key_bounds(keys_PD[: len(keys_PD) // BLOCK * BLOCK].unflatten(0, (-1, BLOCK))).unbind(
                    1
                )
                bound_GN = q_GD.clamp(max=0) @ low_ND.T + q_GD.clamp(min=0) @ high_ND.T
                merged = {"largest": bound_GN.amax(0, keepdim=True), "sum": bound_GN.sum(0, keepdim=True)}
                for name, score_XN in {**merged, "per head": bound_GN}.items():
                    pages_GS = score_XN.topk(7).indices.expand(len(q_GD), -1)
                    kept[name].append(float((mass_GN.gather(1, pages_GS).sum(1) + tail_G).mean()))
    largest, summed, per_head = (torch.tensor(values).mean() for values in kept.values())
    assert largest + 0.01 < summed < per_head


def page_mass(q_GD: torch.Tensor, keys_PD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention's probability in each full page ``[G, N]``, and behind them ``[G]``."""
    probability_GP = (q_GD @ keys_PD.T * q_GD.shape[1] ** -0.5).softmax(dim=-1)
    full = len(keys_PD) // BLOCK * BLOCK
    return probability_GP[:, :full].unflatten(1, (-1, BLOCK)).sum(2), probability_GP[:, full:].sum(1)
