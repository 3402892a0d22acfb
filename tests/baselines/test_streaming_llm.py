"""StreamingLLM against a cache that is renumbered and rotated literally; what it keeps and what it loses."""

import pytest
import torch
from drive import Drive, Tokens, attention, make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baselines.streaming_llm import StreamingLLM, StreamingLLMConfig
from dualdecoder.config import RopeConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.prefill import PrefillSnapshot
from dualdecoder.rope import inverse_frequencies, rotate

ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "llama3": RopeConfig(500_000.0, "llama3", 8.0, 64),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_context=32),
    "yarn, own scale": RopeConfig(kind="yarn", factor=4.0, original_context=32, attention_factor=0.7),
}


def rotated(x_THD: Tensor, position_T: Tensor, rope: RopeConfig) -> Tensor:
    inverse_F, scale = inverse_frequencies(rope, x_THD.shape[-1])
    angle_1TF = (position_T[:, None].float() * inverse_F)[None]
    return rotate(x_THD[None], angle_1TF.cos() * scale, angle_1TF.sin() * scale)[0]


def literal(q_HD: Tensor, k_TKD: Tensor, v_TKD: Tensor, config: StreamingLLMConfig, rope: RopeConfig) -> Tensor:
    """The row at position T - 1: drop, number what is left 0, 1, ..., rotate by those numbers, attend."""
    past = len(k_TKD) - 1
    kept = [p for p in range(past) if p < config.sinks or p >= past - config.window] + [past]
    number = torch.arange(len(kept))
    q_HD = rotated(q_HD[None], number[-1:], rope)[0]
    return attention(q_HD, rotated(k_TKD[kept], number, rope), v_TKD[kept])


class Unrotated(Drive):
    """Tokens are kept before rotation; the method gets them rotated at their positions in the text."""

    def prefill(self, lengths: list[int]) -> None:
        rope = self.method.model.rope
        for layer in range(self.method.model.layers):
            self.tokens.append([])
            for sequence, length in enumerate(lengths):
                self.tokens[layer].append(self.first(length))
                t, position = self.tokens[layer][-1], torch.arange(length)
                q, k = rotated(t.q, position, rope), rotated(t.k, position, rope)
                self.method.prefill_layer(sequence, layer, q, t.k, k, t.v)

    def first(self, length: int) -> Tokens:
        return Tokens(*self.qkv(length))

    def check_step(self, commit: list[bool]) -> None:
        method, rope = self.method, self.method.model.rope
        position = torch.tensor([len(t.k) for t in self.tokens[0]])
        method.begin_step(1, torch.tensor(commit))
        for layer in range(method.model.layers):
            q, k, v = self.qkv(method.batch)
            output = method.attend(layer, *(rotated(x, position, rope)[:, None] for x in (q, k)), v[:, None])
            for b, keep in enumerate(commit):
                context = self.tokens[layer][b].plus(q[b], k[b], v[b])
                expected = literal(q[b], context.k, context.v, method.config, rope)
                torch.testing.assert_close(output[b, 0], expected, atol=2e-4, rtol=2e-4)
                if keep:
                    self.tokens[layer][b] = context
        method.end_step()


def unrotated(config: StreamingLLMConfig, batch: int, context: int, seed: int = 0, **shape) -> Unrotated:
    return Unrotated(make(StreamingLLM, config, batch, context, **shape).method, seed)


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_equals_literal_renumbering(rope: str) -> None:
    """From before the sinks are complete to long after the first eviction."""
    drive = unrotated(StreamingLLMConfig(sinks=3, window=7), 3, 400, rope=ROPES[rope])
    drive.prefill([1, 9, 300])
    for step in range(25):
        drive.check_step([True, step % 3 != 1, True])


@settings(max_examples=25)
@given(data=st.data())
def test_any_sizes_and_commit_masks(data: st.DataObject) -> None:
    sinks, window = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    shape = data.draw(st.sampled_from([{}, {"query_heads": 3, "kv_heads": 1}, {"head_dim": 6}]))
    drive = unrotated(StreamingLLMConfig(sinks, window), len(lengths), 60, data.draw(st.integers(0, 9)), **shape)
    drive.prefill(lengths)
    for _ in range(data.draw(st.integers(1, 12))):
        drive.check_step(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))


def test_a_row_that_is_not_committed_leaves_no_trace() -> None:
    drive = make(StreamingLLM, StreamingLLMConfig(2, 5), 2, 60)
    drive.prefill([4, 30])
    drive.step([True, True])
    before = [t.clone() for t in (drive.method.kv_LBKXPD, drive.method.length_B)]
    drive.step([False, False])
    drive.method.begin_step(1, torch.tensor([False, False]))
    drive.method.end_step()
    sinks = drive.method.config.sinks
    assert torch.equal(drive.method.length_B, before[1])
    assert torch.equal(drive.method.kv_LBKXPD[:, :, :, :, sinks:], before[0][:, :, :, :, sinks:])


def test_a_covering_window_equals_full_kv(smollm2: Engine, manual) -> None:
    prompts = [manual(150), manual(70)]
    snapshots = [smollm2.prefill(prompt) for prompt in prompts]
    logits = []
    for engine in (smollm2, smollm2.with_method("streaming_llm")):
        logits.append(torch.stack([step.logits_BV for step in engine.resume(snapshots, 9).steps]))
    torch.testing.assert_close(logits[1], logits[0], atol=2e-3, rtol=1e-3)


def test_the_real_model_against_literal_renumbering(smollm2: Engine, manual) -> None:
    """One step of every layer on SmolLM2's own queries and keys."""
    snapshot = PrefillSnapshot.take(smollm2.model, manual(120))
    config, model = StreamingLLMConfig(sinks=4, window=40), smollm2.model.config
    method = StreamingLLM(model, config, batch=1, context=200, dtype=torch.float32)
    for layer, (q, before, k, v) in enumerate(snapshot.layers):
        method.prefill_layer(0, layer, q[:-1], before[:-1], k[:-1], v[:-1])
    method.begin_step(1, torch.tensor([True]))
    inverse_F, _ = inverse_frequencies(model.rope, model.head_dim)
    back = torch.tensor([[-119.0]]) * inverse_F
    for layer, (q, before, k, v) in enumerate(snapshot.layers):
        q_pre_rope = rotate(q[None, -1:], back[None].cos(), back[None].sin())[0, 0]
        got = method.attend(layer, q[None, -1:], k[None, -1:], v[None, -1:])[0, 0]
        expected = literal(q_pre_rope, before, v, config, model.rope)
        assert (got - expected).norm() / expected.norm() < 2e-3


def planted(method: StreamingLLM, needle: int, tokens: int) -> float:
    """Weight that a query asking for one token gives it: its value alone is not zero."""
    k, v = torch.zeros(tokens, 2, 8), torch.zeros(tokens, 2, 8)
    k[needle, :, 3], v[needle] = 30.0, 1.0
    query = torch.zeros(1, 1, 4, 8)
    query[..., 3] = 5.0
    for layer in range(2):
        method.prefill_layer(0, layer, torch.zeros(tokens, 4, 8), k, k, v)
    method.begin_step(1, torch.tensor([True]))
    return float(method.attend(0, query, torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8)).amin())


@pytest.mark.parametrize(("needle", "found"), [(4, False), (50, False), (89, False), (90, True), (99, True)])
def test_evicted_tokens_are_gone(needle: int, found: bool) -> None:
    weight = planted(make(StreamingLLM, StreamingLLMConfig(4, 10), 1, 200).method, needle, 100)
    assert weight > 0.99 if found else weight == 0
    assert not StreamingLLM.capabilities.recalls and "recall" in StreamingLLM.capabilities.limits


def test_default_is_the_common_budget() -> None:
    assert StreamingLLMConfig().attended_tokens == 2464


@pytest.mark.parametrize(("field", "value"), [("sinks", -1), ("window", 0), ("window", 2.5)])
def test_bad_settings(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}={value!r} is not allowed"):
        StreamingLLMConfig(**{field: value})
