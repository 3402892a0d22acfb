"""ShadowKV against a dense re-computation from the paper's description; generated tokens, reuse and parts."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from support import assert_bit_equal, trace

from baselines.shadowkv import ShadowKV, ShadowKVConfig
from dualdecoder.config import ModelConfig, RopeConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import CapacityError
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.prefill import prefill

THETA = 10_000.0
SHAPE = ModelConfig("two-layers", 2, 8, 8, 6, 2, 16, 16, 4096, RopeConfig(THETA))
CHUNK = 8


def rotated(x_TKD: np.ndarray, theta: float) -> np.ndarray:
    """Rows turned to positions 0, 1, 2, ...: pair (i, i + D/2) by position / theta ** (2 i / D)."""
    half = x_TKD.shape[-1] // 2
    angle = np.arange(len(x_TKD))[:, None, None] / theta ** (np.arange(half) / half)
    turned = (x_TKD[..., :half] + 1j * x_TKD[..., half:]) * np.exp(1j * angle)
    return np.concatenate((turned.real, turned.imag), axis=-1)


class Dense:
    """One sequence of one layer in float64: what ShadowKV must give, from the description, with no cache."""

    def __init__(self, config: ShadowKVConfig, k_pre_TKD: np.ndarray, v_TKD: np.ndarray, theta: float = THETA) -> None:
        """``k_pre_TKD`` and ``v_TKD`` are those of the prompt."""
        self.config, self.prompt = config, len(k_pre_TKD)
        self.k_TKD, self.v_TKD = rotated(k_pre_TKD.astype(np.float64), theta), v_TKD.astype(np.float64)
        u, s, vt = np.linalg.svd(k_pre_TKD.reshape(self.prompt, -1).astype(np.float64), full_matrices=False)
        low_rank = ((u[:, : config.rank] * s[: config.rank]) @ vt[: config.rank]).reshape(k_pre_TKD.shape)
        self.low_rank_TKD = rotated(low_rank, theta)
        self.chunks = max(0, self.prompt // CHUNK - config.local // CHUNK)

    def append(self, k_KD: np.ndarray, v_KD: np.ndarray) -> None:
        self.k_TKD = np.concatenate((self.k_TKD, k_KD[None]))
        self.v_TKD = np.concatenate((self.v_TKD, v_KD[None]))

    def selection(self, head: int, q_GD: np.ndarray) -> tuple[list[int], list[int]]:
        """Outlier chunks, and the chunks that the queries select, both ascending."""
        members = self.k_TKD[: self.chunks * CHUNK, head].reshape(self.chunks, CHUNK, q_GD.shape[1])
        means = members.mean(axis=1)
        sizes = np.linalg.norm(members, axis=2) * np.linalg.norm(means, axis=1)[:, None]
        worst = (np.einsum("ncd,nd->nc", members, means) / sizes).min(axis=1, initial=2)
        outliers = sorted(np.argsort(worst, kind="stable")[: self.config.outliers].tolist())
        rest = [n for n in range(self.chunks) if n not in outliers]
        exponent = q_GD @ means[rest].T / np.sqrt(q_GD.shape[1])
        weight = np.exp(exponent - exponent.max(axis=1, keepdims=True, initial=-np.inf))
        best = (weight / weight.sum(axis=1, keepdims=True)).max(axis=0)
        order = np.argsort(-best, kind="stable")[: self.config.budget // CHUNK]
        return outliers, sorted(rest[i] for i in order)

    def attend(self, q_HD: np.ndarray, k_KD: np.ndarray, v_KD: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
        """Output ``[H, D]`` of the next token, and each KV head's selected chunks."""
        group, output, chosen = len(q_HD) // len(k_KD), [], []
        for head in range(len(k_KD)):
            q_GD = q_HD[head * group : (head + 1) * group]
            outliers, selected = self.selection(head, q_GD)
            exact = [t for n in outliers for t in range(n * CHUNK, (n + 1) * CHUNK)]
            exact += range(self.chunks * CHUNK, len(self.k_TKD))
            low_rank = [t for n in selected for t in range(n * CHUNK, (n + 1) * CHUNK)]
            keys = np.concatenate((self.low_rank_TKD[low_rank, head], self.k_TKD[exact, head], k_KD[None, head]))
            values = np.concatenate((self.v_TKD[low_rank + exact, head], v_KD[None, head]))
            exponent = q_GD @ keys.T / np.sqrt(q_GD.shape[1])
            weight = np.exp(exponent - exponent.max(axis=1, keepdims=True))
            output.append(weight @ values / weight.sum(axis=1, keepdims=True))
            chosen.append(selected)
        return np.concatenate(output), chosen


def real_chunks(table_KS: torch.Tensor) -> list[list[int]]:
    return [[chunk for chunk in row if chunk != NO_CHUNK] for row in table_KS.tolist()]


def check_decode(config: ShadowKVConfig, shape: ModelConfig, tensors: list, prompts: list[int], commits: list) -> None:
    """Decode the tensors (per sequence: q, k before rotation, k, v, all rotated but the second) and compare each step.

    All layers get the same tensors. ``commits``: a list of bools a step.
    """
    batch, positions = len(prompts), list(prompts)
    method = ShadowKV(shape, config, batch=batch, context=max(len(t[0]) for t in tensors), dtype=torch.float32)
    dense = []
    for b, (q, k_pre, k, v) in enumerate(tensors):
        for layer in range(shape.layers):
            method.prefill_layer(b, layer, *(t[: prompts[b]] for t in (q, k_pre, k, v)))
        dense.append(Dense(config, k_pre[: prompts[b]].numpy(), v[: prompts[b]].numpy(), shape.rope.theta))
    for commit in commits:
        q, k, v = (torch.stack([t[i][p] for t, p in zip(tensors, positions, strict=True)])[:, None] for i in (0, 2, 3))
        method.begin_step(1, torch.tensor(commit))
        outputs = [method.attend(layer, q, k, v) for layer in range(shape.layers)]
        method.end_step()
        for b, one in enumerate(dense):
            expected, chosen = one.attend(*(t[b, 0].double().numpy() for t in (q, k, v)))
            for layer, output in enumerate(outputs):
                assert real_chunks(method.selected[layer][b]) == chosen
                assert_allclose(output[b, 0].numpy(), expected, rtol=1e-3, atol=2e-5)
            if commit[b]:
                one.append(k[b, 0].double().numpy(), v[b, 0].double().numpy())
                positions[b] += 1


def random_tensors(tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)
    q, k_pre, v = (rng.standard_normal((tokens, heads, 16)) for heads in (6, 2, 2))
    # A few directions dominate, as in real keys.
    k_pre *= np.arange(1, 17) ** -0.5 * 2
    return tuple(torch.tensor(t, dtype=torch.float32) for t in (q, k_pre, rotated(k_pre, THETA), v))


@pytest.mark.parametrize("prompt", [1, 33, 47, 200, 325])
@pytest.mark.parametrize(("budget", "rank"), [(8, 12), (64, 12), (64, 32)])
def test_selection_and_output(prompt: int, budget: int, rank: int) -> None:
    config = ShadowKVConfig(budget=budget, rank=rank, generated=64)
    check_decode(config, SHAPE, [random_tensors(prompt + 61, prompt)], [prompt], [[True]] * 60)


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 999), local=st.sampled_from([8, 32]), rank=st.integers(1, 40))
def test_ragged_batches_and_commit_masks(data: st.DataObject, seed: int, local: int, rank: int) -> None:
    """Rows that are not committed leave no trace, whatever the lengths and however the batch is cut into parts."""
    prompts = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    commits = data.draw(st.lists(st.lists(st.booleans(), min_size=len(prompts), max_size=len(prompts)), max_size=9))
    parts, budget = data.draw(st.integers(0, 5)), CHUNK * data.draw(st.integers(1, 6))
    config = ShadowKVConfig(budget=budget, rank=rank, local=local, generated=9, parts=parts)
    check_decode(config, SHAPE, [random_tensors(p + 10, seed + b) for b, p in enumerate(prompts)], prompts, commits)


@pytest.mark.parametrize("layer", [0, 14, 29])
def test_real_tensors(smollm2: Engine, manual, layer: int) -> None:
    tensors = smollm2.prefill(manual(460)).layers[layer]
    shape = replace(smollm2.model.config, layers=1)
    check_decode(ShadowKVConfig(budget=64, generated=32), shape, [tensors], [440], [[True]] * 19)


def dense_logits(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    return engine.model.logits(prefill(engine.model, token_ids, lambda *_: None)[None])[0]


@pytest.mark.parametrize("prompt_tokens", [1, 39, 150])
def test_full_rank_and_covering_budget_equal_full_kv(tiny: Engine, random_ids, prompt_tokens: int) -> None:
    """Also 300 generated tokens, up to the last that is allowed: none is dropped, none becomes a chunk."""
    prompt = random_ids(prompt_tokens)
    run = tiny.with_method("shadowkv", budget=512, rank=999, generated=301).start([prompt], 301)
    got = trace(run)
    new = [run.first_tokens[0], *(tokens[0] for tokens in got.tokens)]
    expected = dense_logits(tiny, prompt + new)[len(prompt) : len(prompt) + 300]
    assert (torch.cat(got.logits) - expected).abs().max() < 1e-3
    assert int(run.method.chunks_B) == max(0, (prompt_tokens - 32) // CHUNK)


def test_an_overrun_is_refused(tiny: Engine, random_ids) -> None:
    engine = tiny.with_method("shadowkv", generated=20)
    assert len(engine.generate([random_ids(50)], max_new_tokens=20)[0].token_ids) == 20
    with pytest.raises(CapacityError, match="max_new_tokens=21: this method decodes at most 20"):
        engine.generate([random_ids(50)], max_new_tokens=21)


@pytest.mark.parametrize("at", [0, 100, 367])
def test_a_needle_far_from_the_window_is_recovered(at: int) -> None:
    """One token of 400 has the key that is asked for: its value comes back from the host. The window starts at 368."""
    q, k_pre, _, v = random_tensors(401, at)
    k_pre[at] = 0
    k_pre[at, :, [0, 8]] = 20.0
    k = torch.tensor(rotated(k_pre.double().numpy(), THETA), dtype=torch.float32)
    method = ShadowKV(SHAPE, ShadowKVConfig(budget=16, rank=8), batch=1, context=500, dtype=torch.float32)
    for layer in range(2):
        method.prefill_layer(0, layer, *(t[:400] for t in (q, k_pre, k, v)))
    assert int(method.chunks_B) * CHUNK == 368
    method.begin_step(1, torch.tensor([True]))
    asked = k[at, :, :].repeat_interleave(3, dim=0)[None, None] * 0.5
    output = method.attend(0, asked, k[None, 400:], v[None, 400:])
    assert_allclose(output[0, 0].numpy(), v[at].repeat_interleave(3, dim=0).numpy(), atol=1e-2)


OPTIONS = {"budget": 64, "rank": 16}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [
        torch.randint(512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (400, 333, 20, 257, 181)
    ]


def test_reuse_changes_nothing(tiny: Engine, prompts: list[list[int]]) -> None:
    """Bit by bit what a buffer gives that forgets everything before each step."""
    engine = tiny.with_method("shadowkv", **OPTIONS)
    run, forgetful = engine.start(prompts, 24), engine.start(prompts, 24)
    begin_step = forgetful.method.begin_step

    def forget(rows: int, commit_B: torch.Tensor) -> None:
        for buffer in forgetful.method.buffers:
            buffer.clear()
            buffer.records_BKSXCD.fill_(1e3)
        begin_step(rows, commit_B)

    forgetful.method.begin_step = forget
    assert_bit_equal(trace(run), trace(forgetful))
    assert forgetful.method.statistics()["hit"] == 0
    assert run.method.statistics()["hit_rate"] > 0.2


def test_reuse_is_counted_right(tiny: Engine, prompts: list[list[int]]) -> None:
    run = tiny.with_method("shadowkv", **OPTIONS).start(prompts, 24)
    heads = [[real_chunks(t.flatten(0, 1)) for t in step] for step in trace(run).selections]
    common = sum(
        len(set(now) & set(before))
        for step, last in zip(heads[1:], heads, strict=False)
        for rows in zip(step, last, strict=True)
        for now, before in zip(*rows, strict=True)
    )
    per_step = sum(len(chosen) for layer in heads[0] for chosen in layer)
    statistics = run.method.statistics()
    assert statistics["reused"] == statistics["hit"] == common > 0
    assert statistics["selected"] == 23 * per_step
    assert statistics["comparable"] == 22 * per_step
    assert statistics["urgent"] == statistics["selected"] - common
    # Values only, and not a byte ahead of time.
    assert statistics["urgent_bytes"] == statistics["urgent"] * CHUNK * 16 * 4
    assert statistics["prefetched_bytes"] == 0


@pytest.mark.parametrize("parts", [2, 3, 5, 99])
def test_parts_change_only_rounding(tiny: Engine, prompts: list[list[int]], parts: int) -> None:
    whole = trace(tiny.with_method("shadowkv", **OPTIONS, parts=1).start(prompts, 16))
    run = tiny.with_method("shadowkv", **OPTIONS, parts=parts).start(prompts, 16)
    got = trace(run)
    assert len(run.method.parts) == min(parts, 5)
    assert got.tokens == whole.tokens
    assert max((a - b).abs().max() for a, b in zip(got.logits, whole.logits, strict=True)) < 1e-4


def test_parts_take_turns(tiny: Engine, prompts: list[list[int]]) -> None:
    """Each part's transfers are under way while every other part computes, in all layers."""
    run = tiny.with_method("shadowkv", **OPTIONS, parts=2).start(prompts, 2)
    method, seen = run.method, []
    begin_attention = method.begin_attention

    def recording(part: int, layer: int, *tensors: torch.Tensor) -> Callable[[], torch.Tensor]:
        attend = begin_attention(part, layer, *tensors)
        seen.append(("begins", part, layer))
        return lambda: seen.append(("attends", part, layer)) or attend()

    method.begin_attention = recording
    list(run.steps)
    layers = method.model.layers
    expected = [("begins", part, 0) for part in (0, 1)]
    for layer in range(1, layers):
        for part in (0, 1):
            expected += [("attends", part, layer - 1), ("begins", part, layer)]
    assert seen == [*expected, *(("attends", part, layers - 1) for part in (0, 1))]


def test_unwritten_memory_is_never_read(tiny: Engine, prompts: list[list[int]]) -> None:
    engine = tiny.with_method("shadowkv", **OPTIONS)
    snapshots, allocate = [engine.prefill(prompt) for prompt in prompts], engine._allocate
    truth = trace(engine.resume(snapshots, 12))

    def poisoned(batch: int, context: int) -> ShadowKV:
        method = allocate(batch, context)
        for state, keys, buffer in zip(method.layers, method.keys, method.buffers, strict=True):
            for tensor in (state.window_BKXWD, state.landmarks_BKND, state.outlier_records_BKOXCD, keys.left_BNCU,
                           keys.right_BKUD, buffer.records_BKSXCD):  # fmt: skip
                tensor.uniform_(-1e3, 1e3)
        return method

    engine._allocate = poisoned
    assert_bit_equal(trace(engine.resume(snapshots, 12)), truth)


def test_without_transfers_no_value_moves() -> None:
    method = ShadowKV(SHAPE, ShadowKVConfig(budget=16, rank=8), batch=1, context=300, dtype=torch.float32)
    method.transfers = False
    tensors = random_tensors(201, 0)
    for layer in range(2):
        method.prefill_layer(0, layer, *(t[:200] for t in tensors))
    method.begin_step(1, torch.tensor([True]))
    method.attend(0, *(tensors[i][None, 200:] for i in (0, 2, 3)))
    keys, values = method.buffers[0].records_BKSXCD.unbind(dim=3)
    assert keys.abs().amin() > 0
    assert values.abs().amax() == 0
