"""InfiniGen against the algorithm written out token by token; its matrix, its choice, and a needle that it finds."""

import math

import pytest
import torch
from drive import Tokens, attention, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baselines.infinigen import InfiniGen, InfiniGenConfig
from baselines.infinigen_ops import guessed_scores, skew, top_tokens, wanted_tokens
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.prefill import PrefillSnapshot


def chosen(guess_HJ: Tensor, partial_KTJ: Tensor, head_dim: int, alpha: float, cap: int) -> list[list[int]]:
    """Tokens of every KV head, best first, from the description: one logit, one comparison at a time."""
    group, heads = len(guess_HJ) // len(partial_KTJ), len(partial_KTJ)
    scores, count = [], 0
    for k in range(heads):
        best: dict[int, float] = {}
        for g in range(group):
            logits = [float(guess_HJ[k * group + g] @ key) / math.sqrt(head_dim) for key in partial_KTJ[k]]
            for token, logit in enumerate(logits):
                best[token] = max(best.get(token, -math.inf), logit - max(logits))
        scores.append(best)
        count += sum(score > -alpha for score in best.values())
    wanted = min(count // heads, cap)
    return [sorted(best, key=lambda token, s=best: (-s[token], token))[:wanted] for best in scores]


def check_layer(method: InfiniGen, layer: int, b: int, guess_HD: Tensor, context: Tokens, output_HD: Tensor) -> None:
    """Choice and output of one sparse layer for one sequence. The guess is on the context without the row itself."""
    heads, group = method.model.kv_heads, method.model.group
    past = len(context.k) - 1
    skew_KDJ = method.skews[layer][b]
    guess_HJ = torch.cat([guess_HD[k * group : (k + 1) * group] @ skew_KDJ[k] for k in range(heads)])
    partial_KTJ = torch.stack([context.k[:past, k] @ skew_KDJ[k] for k in range(heads)])
    expected = chosen(guess_HJ, partial_KTJ, method.model.head_dim, method.config.alpha, method.config.cap)
    held = method.buffers[layer % 2].held_BKS[b]
    for k, tokens in enumerate(expected):
        assert [t for t in held[k].tolist() if t >= 0] == tokens
        rows, queries = [*tokens, past], slice(k * group, (k + 1) * group)
        dense = attention(context.q[-1, queries], context.k[rows, k : k + 1], context.v[rows, k : k + 1])
        torch.testing.assert_close(output_HD[queries], dense, atol=1e-4, rtol=1e-4)


def run_checked(method: InfiniGen, drive, commits: list[list[bool]]) -> None:
    """Layer 1's guess is layer 1's query of the same step in ``drive``, so it can be recomputed."""
    for commit in commits:
        before = [method.partials[layer].clone() for layer in range(1, method.model.layers)]
        for layer, (contexts, output) in enumerate(drive.step(commit)):
            for b, context in enumerate(contexts):
                if layer < method.config.dense_layers:
                    dense = attention(context.q[-1], context.k, context.v)
                    torch.testing.assert_close(output[b, 0], dense, atol=1e-4, rtol=1e-4)
                elif layer >= method.model.layers - 2:  # the buffers still hold the last two layers
                    check_layer(method, layer, b, context.q[-1], context, output[b, 0])
        for layer, partial in enumerate(before, start=1):
            grown = (method.partials[layer] != partial).any(dim=(1, 3)).sum(dim=1).tolist()
            assert grown == [int(committed) for committed in commit]


def test_choice_and_output_token_by_token() -> None:
    config = InfiniGenConfig(alpha=3.0, ratio=0.5, cap=12, dense_layers=1)
    drive = make(InfiniGen, config, 3, 80, layers=3, head_dim=16)
    drive.prefill([1, 30, 47])
    run_checked(drive.method, drive, [[True, step % 3 != 1, step < 5] for step in range(9)])


@settings(max_examples=20)
@given(data=st.data())
def test_any_sizes_and_commit_masks(data: st.DataObject) -> None:
    alpha, cap = data.draw(st.sampled_from([0.5, 2.0, 5.0])), data.draw(st.integers(1, 20))
    config = InfiniGenConfig(alpha, data.draw(st.sampled_from([0.1, 0.7, 1.0])), cap, 1)
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=3))
    shape = data.draw(st.sampled_from([{}, {"query_heads": 3, "kv_heads": 1}, {"head_dim": 10}]))
    drive = make(InfiniGen, config, len(lengths), 40, seed=data.draw(st.integers(0, 9)), **shape)
    drive.prefill(lengths)
    masks = st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))
    run_checked(drive.method, drive, [data.draw(masks) for _ in range(data.draw(st.integers(1, 6)))])


@pytest.fixture(scope="module")
def real_layers(smollm2: Engine, manual) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    return PrefillSnapshot.take(smollm2.model, manual(300)).layers


def test_choice_on_the_real_model(smollm2: Engine, manual) -> None:
    """SmolLM2's own keys, and the guesses that the engine makes."""
    engine = smollm2.with_method("infinigen", cap=20, dense_layers=28)
    run, seen = engine.start([manual(90)], 2), {}
    method, foresee = run.method, run.method.foresee
    method.foresee = lambda layer, q: (seen.update({layer: q.clone()}), foresee(layer, q))
    next(run.steps)
    for layer in (28, 29):
        heads, group = method.model.kv_heads, method.model.group
        guess_HJ = torch.cat(
            [seen[layer][0, 0, k * group : (k + 1) * group] @ method.skews[layer][0, k] for k in range(heads)]
        )
        expected = chosen(guess_HJ, method.partials[layer][0, :, :90], method.model.head_dim, 5.0, 20)
        held = method.buffers[layer % 2].held_BKS[0]
        assert [set(h.tolist()) - {-1} for h in held] == [set(tokens) for tokens in expected]


def test_the_matrix_is_orthogonal_and_keeps_products(real_layers) -> None:
    q, _, k, _ = real_layers[10]
    whole_DD = skew(q[:, :3], k[:, 0], 64)
    torch.testing.assert_close(whole_DD.T @ whole_DD, torch.eye(64), atol=1e-5, rtol=0)
    products = q[:, 0] @ k[:, 0].T
    torch.testing.assert_close((q[:, 0] @ whole_DD) @ (k[:, 0] @ whole_DD).T, products, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 5, 15, 29])
def test_few_columns_find_more_of_the_best_tokens(real_layers, layer: int) -> None:
    """The best 20 tokens by 24 of 64 columns behind the matrix, against as many of the keys' own."""
    q, _, k, _ = real_layers[layer]
    size = q[:, :3].abs().mean(dim=(0, 1)) + k[:, 0].abs().mean(dim=0)
    plain = torch.eye(64)[:, size.topk(24).indices]

    def found(columns: Tensor) -> float:
        guessed = (q[150:, 0] @ columns) @ (k[:, 0] @ columns).T
        sets = (scores.topk(20).indices for scores in (guessed, q[150:, 0] @ k[:, 0].T))
        return float(torch.stack([torch.isin(*rows).float().mean() for rows in zip(*sets, strict=True)]).mean())

    assert found(skew(q[:, :3], k[:, 0], 24)) > found(plain) + 0.02


def test_with_all_columns_the_scores_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(50, 2, 16, generator=generator), torch.randn(50, 16, generator=generator)
    whole = skew(q, k, 16)
    scores = guessed_scores((q[-1] @ whole)[None, None], (k @ whole)[None, None], torch.tensor([40]), 0.25)[0, 0]
    logits = q[-1] @ k[:40].T * 0.25
    torch.testing.assert_close(scores[:40], (logits - logits.amax(1, keepdim=True)).amax(0), atol=1e-5, rtol=1e-5)
    assert (scores[40:] == -torch.inf).all()


def test_count_cap_and_ties() -> None:
    scores = torch.tensor([[[0.0, -1, -1, -9, -1], [-7, 0.0, -6, -9, -8]], [[0.0] * 5, [0.0] * 4 + [-torch.inf]]])
    # Sequence 0: 4 and 1 above -5, mean 2.5; sequence 1: 5 and 4, one token does not exist, capped.
    wanted = wanted_tokens(scores, 5.0, 3)
    assert wanted.tolist() == [2, 3]
    assert top_tokens(scores, wanted, 3).tolist() == [[[0, 1, -1], [1, 2, -1]], [[0, 1, 2], [0, 1, 2]]]


def test_everything_wanted_equals_full_kv(smollm2: Engine, manual) -> None:
    snapshots = [smollm2.prefill(manual(n)) for n in (150, 70)]
    engines = (smollm2, smollm2.with_method("infinigen", alpha=math.inf, cap=1000))
    runs = [engine.resume(snapshots, 9) for engine in engines]
    logits = [torch.stack([step.logits_BV for step in run.steps]) for run in runs]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-3, rtol=1e-3)


def test_everything_wanted_has_the_tokens_of_full_kv(tiny: Engine, random_ids) -> None:
    prompts = [random_ids(n, n) for n in (3, 41, 190)]
    expected = [c.token_ids for c in tiny.generate(prompts, max_new_tokens=60)]
    engine = tiny.with_method("infinigen", alpha=math.inf, cap=1000)
    assert [c.token_ids for c in engine.generate(prompts, max_new_tokens=60)] == expected


def test_a_ragged_batch_equals_single_sequences(tiny: Engine, random_ids) -> None:
    """Also n, which the source averages over the batch."""
    engine, prompts = tiny.with_method("infinigen", cap=20), [random_ids(n, n) for n in (3, 41, 190)]
    together = engine.generate(prompts, max_new_tokens=40)
    alone = [engine.generate([prompt], max_new_tokens=40)[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


@pytest.mark.parametrize("needle", [0, 20, 97])
def test_a_needle_far_back_is_recalled(needle: int) -> None:
    drive = make(InfiniGen, InfiniGenConfig(cap=4, dense_layers=1), 1, 300)
    method, generator = drive.method, torch.Generator().manual_seed(needle)
    q, k = torch.randn(200, 4, 8, generator=generator), torch.randn(200, 2, 8, generator=generator)
    v = torch.zeros(200, 2, 8)
    k[needle] *= 8
    v[needle] = 1.0
    for layer in range(2):
        method.prefill_layer(0, layer, q, k, k, v)
    query = k[needle].repeat_interleave(2, dim=0)[None, None]
    method.begin_step(1, torch.tensor([True]))
    own = torch.zeros(1, 1, 2, 8)
    method.foresee(1, query)
    assert method.attend(0, query, own, own).amin() > 0.99
    assert method.attend(1, query, own, own).amin() > 0.99


def test_statistics_count_committed_rows() -> None:
    drive = make(InfiniGen, InfiniGenConfig(alpha=math.inf, cap=10, dense_layers=2), 2, 50, layers=3)
    drive.prefill([20, 30])
    drive.step([True, True])
    drive.step([True, False])
    record, whole = 2 * 8 * 4, 50 * 2 * 2 * 8 * 4
    statistics = drive.method.statistics()
    assert statistics["mean_wanted"] == 10
    assert statistics["urgent_bytes"] == 3 * whole
    assert statistics["prefetched_bytes"] == 3 * whole + 3 * 10 * 2 * record


def test_a_guess_for_a_dense_layer_fetches_nothing() -> None:
    drive = make(InfiniGen, InfiniGenConfig(dense_layers=2), 1, 50, layers=3)
    drive.prefill([20])
    drive.method.begin_step(1, torch.tensor([True]))
    drive.method.foresee(1, torch.zeros(1, 1, 4, 8))
    assert all((buffer.held_BKS == -1).all() for buffer in drive.method.buffers)


def test_default_is_the_common_budget() -> None:
    assert InfiniGenConfig().attended_tokens == 2464


@pytest.mark.parametrize(
    ("field", "value"),
    [("alpha", 0), ("alpha", -1.0), ("ratio", 0.0), ("ratio", 1.5), ("cap", 0), ("dense_layers", 0), ("alpha", True)],
)
def test_bad_settings(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value!r} is not allowed"):
        InfiniGenConfig(**{field: value})
