"""H2O against the algorithm written out: the whole probability matrix, then one token at a time, head by head."""

import pytest
import torch
from drive import Drive, Tokens, attention, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baselines import h2o
from baselines.h2o import H2O, H2OConfig, column_sums, kept_tokens
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.prefill import PrefillSnapshot


def whole_matrix(q_THD: Tensor, k_TKD: Tensor) -> Tensor:
    """Causal probabilities ``[H, T, T]``."""
    tokens, heads = q_THD.shape[:2]
    k_THD = k_TKD.repeat_interleave(heads // k_TKD.shape[1], dim=1)
    logits_HTT = torch.einsum("ihd,jhd->hij", q_THD, k_THD).float() * q_THD.shape[-1] ** -0.5
    return logits_HTT.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


class Head:
    """One KV head of one sequence: a dictionary position -> (key, value, score)."""

    def __init__(self, tokens: Tokens, head: int, group: int, config: H2OConfig) -> None:
        self.config = config
        received = whole_matrix(tokens.q, tokens.k)[head * group : (head + 1) * group].sum(dim=(0, 1)).tolist()
        self.scores = dict(enumerate(received))
        self.rows = {p: (tokens.k[p, head], tokens.v[p, head]) for p in self.scores}
        while len(self.scores) > config.heavy + config.recent:
            self.evict(len(tokens.k) - 1)

    def evict(self, newest: int) -> None:
        old = [p for p in self.scores if p <= newest - self.config.recent]
        # Of equal scores the oldest: min takes the first.
        del self.scores[min(sorted(old), key=self.scores.__getitem__)]

    def step(self, q_GD: Tensor, k_D: Tensor, v_D: Tensor, position: int, commit: bool) -> Tensor:
        rows = {p: self.rows[p] for p in self.scores} | {position: (k_D, v_D)}
        k_TD, v_TD = (torch.stack([row[i] for row in rows.values()]) for i in (0, 1))
        probability_GT = (q_GD @ k_TD.T * q_GD.shape[-1] ** -0.5).softmax(dim=-1)
        if commit:
            self.rows[position], self.scores[position] = (k_D, v_D), 0.0
            for p, received in zip(rows, probability_GT.sum(dim=0).tolist(), strict=True):
                self.scores[p] += received
            if len(self.scores) > self.config.heavy + self.config.recent:
                self.evict(position)
        return probability_GT @ v_TD


class Checked(Drive):
    """A drive that recomputes every head by ``Head`` and compares what is kept, the scores and the outputs."""

    def prefill(self, lengths: list[int]) -> None:
        super().prefill(lengths)
        model, config = self.method.model, self.method.config
        self.heads = [
            [[Head(t, k, model.group, config) for k in range(model.kv_heads)] for t in layer] for layer in self.tokens
        ]
        self.check_state()

    def check_step(self, commit: list[bool]) -> None:
        results = self.step(commit)
        for heads, (contexts, output) in zip(self.heads, results, strict=True):
            for b, context in enumerate(contexts):
                group = self.method.model.group
                for k, head in enumerate(heads[b]):
                    q_GD = context.q[-1, k * group : (k + 1) * group]
                    at = len(context.k) - 1
                    expected = head.step(q_GD, context.k[-1, k], context.v[-1, k], at, commit[b])
                    torch.testing.assert_close(
                        output[b, 0, k * group : (k + 1) * group], expected, atol=1e-4, rtol=1e-4
                    )
        self.check_state()

    def check_state(self) -> None:
        method = self.method
        for layer, sequences in enumerate(self.heads):
            for b, heads in enumerate(sequences):
                filled = min(len(self.tokens[layer][b].k), method.places)
                for k, head in enumerate(heads):
                    position = method.position_LBKP[layer, b, k, :filled].tolist()
                    assert sorted(position) == sorted(head.scores)
                    scores = torch.tensor([head.scores[p] for p in position])
                    torch.testing.assert_close(method.score_LBKP[layer, b, k, :filled], scores, atol=1e-4, rtol=1e-4)


def checked(config: H2OConfig, batch: int, context: int, seed: int = 0, **shape) -> Checked:
    return Checked(make(H2O, config, batch, context, **shape).method, seed)


def test_prefill_and_many_steps_against_the_whole_matrix(monkeypatch) -> None:
    """From a nearly empty cache, one that fills up, and one that was full after the prompt; blocks of 8 queries."""
    monkeypatch.setattr(h2o, "QUERY_BLOCK", 8)
    drive = checked(H2OConfig(heavy=6, recent=5), 3, 120)
    drive.prefill([1, 9, 45])
    for step in range(30):
        drive.check_step([True, step % 4 != 1, step % 7 != 2])


@settings(max_examples=15)
@given(data=st.data())
def test_any_sizes_and_commit_masks(data: st.DataObject) -> None:
    config = H2OConfig(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=3))
    shape = data.draw(st.sampled_from([{}, {"query_heads": 3, "kv_heads": 1}, {"query_heads": 2, "head_dim": 6}]))
    drive = checked(config, len(lengths), 60, data.draw(st.integers(0, 9)), layers=1, **shape)
    drive.prefill(lengths)
    for _ in range(data.draw(st.integers(1, 8))):
        drive.check_step(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))


@pytest.mark.parametrize("tokens", [1, 255, 256, 300, 515])
def test_column_sums_are_those_of_the_matrix(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(tokens, heads, 8, generator=generator) * 2 for heads in (6, 2))
    expected = whole_matrix(q, k).unflatten(0, (2, 3)).sum(dim=(1, 2))
    torch.testing.assert_close(column_sums(q, k), expected, atol=1e-4, rtol=1e-4)
    assert float(column_sums(q, k).sum()) == pytest.approx(tokens * 6, rel=1e-5)


def test_of_equal_sums_the_newer_are_kept() -> None:
    sums = torch.tensor([[3.0, 1.0, 1.0, 1.0, 2.0, 0.0, 0.0]])
    assert kept_tokens(sums, heavy=3, recent=2).tolist() == [[0, 3, 4, 5, 6]]


def test_the_real_model_against_the_whole_matrix(smollm2: Engine, manual) -> None:
    """SmolLM2's own queries and keys: the kept sets of a prompt, then 12 steps of the next real tokens."""
    snapshot, config = PrefillSnapshot.take(smollm2.model, manual(112)), H2OConfig(20, 20)
    method = H2O(smollm2.model.config, config, batch=1, context=200, dtype=torch.float32)
    layers = [0, 7, 29]
    group = method.model.group
    references = {}
    for layer, (q, before, k, v) in enumerate(snapshot.layers):
        method.prefill_layer(0, layer, q[:100], before[:100], k[:100], v[:100])
        if layer in layers:
            prompt = Tokens(q[:100], k[:100], v[:100])
            references[layer] = [Head(prompt, head, group, config) for head in range(method.model.kv_heads)]
    for position in range(100, 112):
        method.begin_step(1, torch.tensor([True]))
        for layer, (q, _, k, v) in enumerate(snapshot.layers):
            got = method.attend(layer, *(x[None, position : position + 1] for x in (q, k, v)))[0, 0]
            for head, reference in enumerate(references.get(layer, [])):
                queries = slice(head * group, (head + 1) * group)
                expected = reference.step(q[position, queries], k[position, head], v[position, head], position, True)
                torch.testing.assert_close(got[queries], expected, atol=1e-3, rtol=1e-3)
        method.end_step()
    for layer, heads in references.items():
        for head, reference in enumerate(heads):
            assert set(method.position_LBKP[layer, 0, head].tolist()) == set(reference.scores)


def test_a_covering_budget_equals_full_kv(smollm2: Engine, manual) -> None:
    snapshots = [smollm2.prefill(manual(n)) for n in (150, 70)]
    logits = [
        torch.stack([step.logits_BV for step in engine.resume(snapshots, 9).steps])
        for engine in (smollm2, smollm2.with_method("h2o"))
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-3, rtol=1e-3)


def test_a_row_that_is_not_committed_leaves_no_trace() -> None:
    drive = make(H2O, H2OConfig(3, 4), 2, 60)
    drive.prefill([4, 30])
    state = [getattr(drive.method, name) for name in ("kv_LBKXPD", "score_LBKP", "position_LBKP", "length_B")]
    before = [t.clone() for t in state]
    drive.step([False, False])
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize(("needle", "asked_before", "found"), [(50, False, False), (50, True, True), (92, False, True)])
def test_a_token_that_nobody_asked_for_is_gone(needle: int, asked_before: bool, found: bool) -> None:
    """A needle beyond the recent window survives only if the prompt itself attended to it."""
    method = make(H2O, H2OConfig(6, 10), 1, 200).method
    q, k, v = torch.zeros(100, 4, 8), torch.zeros(100, 2, 8), torch.zeros(100, 2, 8)
    q[:, :, 3], k[needle, :, 3], v[needle] = 5.0 if asked_before else -5.0, 30.0, 1.0
    for layer in range(2):
        method.prefill_layer(0, layer, q, k, k, v)
    method.begin_step(1, torch.tensor([True]))
    query = torch.zeros(1, 1, 4, 8)
    query[..., 3] = 5.0
    weight = float(method.attend(0, query, torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)).amin())
    assert weight > 0.99 if found else weight == 0
    assert not H2O.capabilities.recalls and "recalled" in H2O.capabilities.limits


def test_evicted_for_good_while_decoding() -> None:
    """What leaves the recent window unasked is gone for a query that would have wanted it."""
    drive = make(H2O, H2OConfig(4, 4), 1, 60, layers=1)
    drive.prefill([8])
    for _ in range(30):
        contexts, _ = drive.step([True])[0]
    kept = sorted(drive.method.position_LBKP[0, 0, 0].tolist())
    assert kept[-4:] == [34, 35, 36, 37] and len(kept) == 8
    context = contexts[0]
    best = (context.k[:, 0] @ context.k[:, 0].T).argmax(dim=-1).tolist()
    lost = next(p for p in range(34) if p not in kept and best[p] == p)
    query = context.k[lost, 0] * 40 / context.k[lost, 0].norm()
    method, own = drive.method, torch.zeros(1, 1, 2, 8)
    method.begin_step(1, torch.tensor([False]))
    output = method.attend(0, query.expand(1, 1, 4, 8), own, own)[0, 0, 0]
    wanted = attention(query.expand(4, 8), context.k, context.v)[0]
    assert (output - wanted).norm() > 0.3 * wanted.norm()


def test_default_is_the_common_budget() -> None:
    assert H2OConfig().attended_tokens == 2464


@pytest.mark.parametrize("field", ["heavy", "recent"])
def test_bad_settings(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}=0 is not allowed"):
        H2OConfig(**{field: 0})
