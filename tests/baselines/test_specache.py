"""SpeCache against a re-computation from the paper's description, and what it promises: bytes, exactness, recall."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from baselines.specache import SpeCache, SpeCacheConfig
from dualdecoder.config import ModelConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.method import method_config
from dualdecoder.shapes import SHAPES
from experiments.ruler_tasks.samples import Sampler
from experiments.ruler_tasks.scoring import score

SHAPE = ModelConfig("two-layers", 2, 8, 8, 6, 2, 16, 16, 4096)
NOBODY = torch.tensor([False])


def low_bits(groups: np.ndarray, bits: int) -> np.ndarray:
    """Each row of numbers replaced by the nearest level of its row; scale and zero are stored in fp32."""
    if bits == 16:
        return groups
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    zero = np.float32((3 * low + high) / 4 if bits == 1 else low)
    scale = np.float32((high - low) / (2 if bits == 1 else 3))
    levels = zero[..., None] + scale[..., None] * np.arange(2**bits)
    nearest = np.abs(levels - groups[..., None]).argmin(axis=2)
    return np.take_along_axis(levels, nearest[..., None], axis=2)[..., 0]


@dataclass
class Head:
    """One KV head of one sequence and layer, by the description: exact keys and values, and the set of exact tokens."""

    config: SpeCacheConfig
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    exact: set[int] = field(default_factory=set)

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        keys, values, group = np.array(self.keys), np.array(self.values), self.config.group
        for begin in range(0, len(keys) - group + 1, group):
            span = slice(begin, begin + group)
            keys[span] = low_bits(keys[span].T, self.config.bits).T
        channels = min(group, values.shape[1])
        old = max(0, len(values) - group)
        values[:old] = low_bits(values[:old].reshape(-1, channels), self.config.bits).reshape(values[:old].shape)
        for position in self.exact:
            keys[position], values[position] = self.keys[position], self.values[position]
        return keys, values

    def step(self, q_RGD: np.ndarray, k_RD: np.ndarray, v_RD: np.ndarray, commit: bool) -> np.ndarray:
        """Outputs [R, G, D]; then the commit and the next step's exact tokens."""
        keys, values = (np.concatenate(pair) for pair in zip(self.seen(), (k_RD, v_RD), strict=True))
        past, rows = len(self.keys), len(k_RD)
        outputs = np.zeros_like(q_RGD)
        for row in range(rows):
            visible = past + row + 1
            logits = q_RGD[row] @ keys[:visible].T / np.sqrt(keys.shape[1])
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            outputs[row] = weights @ values[:visible]
        if commit:
            self.keys.append(k_RD[0])
            self.values.append(v_RD[0])
        if commit or rows == 1:
            may_choose = weights.mean(axis=0)[: past + rows - 1]
            best = np.argsort(-may_choose, kind="stable")[: self.config.top]
            complete = len(self.keys) // self.config.group * self.config.group
            self.exact = {int(position) for position in best if position < complete}
        return outputs


@dataclass
class Case:
    """A method and its re-computation, fed with the same random tensors."""

    config: SpeCacheConfig
    prompts: list[int]
    new: int
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        batch, self.context = len(self.prompts), max(self.prompts) + self.new
        self.method = SpeCache(SHAPE, self.config, batch=batch, context=self.context, dtype=torch.float32)
        # By layer and sequence: queries of every position twice as real and speculated rows need them, keys, values.
        self.q = 2 * torch.randn(2, batch, self.context + 1, 6, 16, generator=generator)
        self.k, self.v = torch.randn(2, 2, batch, self.context + 1, 2, 16, generator=generator)
        self.heads = [[[Head(self.config) for _ in range(2)] for _ in self.prompts] for _ in range(2)]
        for layer, b in np.ndindex(2, batch):
            tokens = self.prompts[b]
            q, k, v = (t[layer, b, :tokens] for t in (self.q, self.k, self.v))
            self.method.prefill_layer(b, layer, q, k, k, v)
            for head in range(2):
                state = self.heads[layer][b][head]
                state.keys, state.values = list(k[:, head].double().numpy()), list(v[:, head].double().numpy())

    def step(self, rows: int, commit: list[bool]) -> None:
        method = self.method
        method.begin_step(rows, torch.tensor(commit))
        lengths = method.length_B.tolist()
        for layer in range(2):
            q, k, v = (self._rows(t[layer], lengths, rows) for t in (self.q, self.k, self.v))
            output = method.attend(layer, q, k, v)
            for b, head in np.ndindex(len(commit), 2):
                heads = slice(3 * head, 3 * head + 3)
                expected = self.heads[layer][b][head].step(
                    *(t[b].double().numpy() for t in (q[:, :, heads], k[:, :, head], v[:, :, head])), commit[b]
                )
                assert_allclose(output[b, :, heads].numpy(), expected, rtol=1e-4, atol=1e-5)
                chosen = method.layers[layer].chosen_BKS[b, head].tolist()
                assert set(chosen) - {-1} == self.heads[layer][b][head].exact
        method.end_step()

    def _rows(self, tensor_BTHD: Tensor, lengths: list[int], rows: int) -> Tensor:
        return torch.stack([tensor_BTHD[b, length : length + rows] for b, length in enumerate(lengths)])


@settings(max_examples=25)
@given(
    bits=st.sampled_from([1, 2, 16]),
    group=st.sampled_from([4, 8, 16, 64]),
    top=st.integers(1, 20),
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    seed=st.integers(0, 999),
)
def test_outputs_and_sets_are_those_of_the_description(
    bits: int, group: int, top: int, prompts: list[int], seed: int
) -> None:
    case = Case(SpeCacheConfig(bits=bits, group=group, top=top), prompts, 24, seed)
    case.step(1, [False] * len(prompts))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        case.step(2, (torch.rand(len(prompts), generator=generator) < 0.8).tolist())


def test_default_sizes_over_several_groups() -> None:
    case = Case(SpeCacheConfig(), [200, 3, 129], 80, 0)
    case.step(1, [False] * 3)
    for number in range(75):
        case.step(2, [True, True, number % 3 > 0])
    statistics = case.method.statistics()
    record = 2 * 16 * 4
    assert statistics["urgent_bytes"] == 0
    assert statistics["prefetched_bytes"] == (statistics["selected"] - statistics["reused"]) * record > 0
    assert statistics["reused"] > 0


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value if isinstance(value, list | tuple) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [tensor for item in items for tensor in tensors(item)]


def test_the_pre_decode_leaves_no_trace() -> None:
    case = Case(SpeCacheConfig(group=8, top=5), [40, 23], 10, 1)
    kept = [*case.method.host.records, *(t for layer in case.method.layers for t in tensors(layer.cache))]
    before = [tensor.clone() for tensor in [*kept, case.method.length_B]]
    case.step(1, [False, False])
    assert all(torch.equal(a, b) for a, b in zip([*kept, case.method.length_B], before, strict=True))
    assert all((layer.chosen_BKS >= 0).any() for layer in case.method.layers)


def test_a_step_that_does_not_commit_leaves_no_trace() -> None:
    """Also not in the exact tokens, although other sequences of the batch choose theirs."""
    case = Case(SpeCacheConfig(group=8, top=5), [40, 23], 10, 1)
    case.step(1, [False, False])
    held = [t for layer in case.method.layers for t in (*tensors(layer.cache), *tensors(layer.pairs), layer.chosen_BKS)]
    held += case.method.host.records
    before = [tensor.clone() for tensor in held]
    case.step(2, [True, False])
    for now, then in zip(held, before, strict=True):
        assert torch.equal(now[1], then[1])
    assert any(not torch.equal(now[0], then[0]) for now, then in zip(held, before, strict=True))


def test_pairs_in_the_buffer_are_not_copied_again() -> None:
    """The same query in every step chooses the same tokens: nothing crosses the link after the first time."""
    method = SpeCache(SHAPE, SpeCacheConfig(group=8, top=4), batch=1, context=60, dtype=torch.float32)
    torch.manual_seed(0)
    q, k, v = torch.randn(40, 6, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    k[10:14] *= 10
    for layer in range(2):
        method.prefill_layer(0, layer, q, k, k, v)
    rows = (q[None, :2].clone(), torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16))
    sent = []
    for commit in (NOBODY, ~NOBODY, ~NOBODY, ~NOBODY):
        method.begin_step(1 if commit is NOBODY else 2, commit)
        for layer in range(2):
            method.attend(layer, *(t[:, :1] if commit is NOBODY else t for t in rows))
        method.end_step()
        sent.append(method.statistics()["prefetched_bytes"])
    assert sent[0] == 0, "bytes of steps that commit"
    assert sent[1] == sent[2] == sent[3]
    assert method.statistics()["selected"] > 0


@pytest.mark.parametrize(("bits", "expected"), [(2, 20480), (1, 12288)])
def test_bytes_a_token_of_the_8b_shape(bits: int, expected: int) -> None:
    """2.5 and 1.5 bits a number: codes, and a scale and zero of 16 bits for 64 of them."""
    sizes = {"batch": 3, "dtype": torch.bfloat16}
    config = SpeCacheConfig(bits=bits)
    short, long = (SpeCache.plan(SHAPES["llama-3-8b"], config, context=n, **sizes) for n in (65536, 131072))
    assert long.gpu["low_bit"] == 3 * 131072 * expected
    grown = {name for name in long.gpu if long.gpu[name] != short.gpu[name]}
    assert grown == {"low_bit"}
    assert long.gpu["residual"] == 3 * 32 * 64 * 8 * 2 * 128 * 2
    assert long.host["kv"] == 3 * 131072 * 131072


def test_read_bytes_are_those_of_what_is_there() -> None:
    method = SpeCache(SHAPE, SpeCacheConfig(group=8, top=4), batch=2, context=64, dtype=torch.float32)
    method.fill_synthetic(40)
    codes, levels = 2 * 16 / 4, 2 * 16 / 8 * 4 + 2 * 2 * 4
    # 32 tokens in low bits; the ring of 8 and 4 pairs in 32 bits; 2 heads, layers, sequences each.
    assert method.read_bytes() == 8 * (32 * (codes + levels) + (8 + 4) * 2 * 16 * 4)


def test_16_bits_are_full_kv(tiny: Engine, random_ids) -> None:
    prompts = [random_ids(n, n) for n in (150, 64, 5)]
    expected = tiny.with_method("full_kv").generate(prompts, max_new_tokens=80)
    got = tiny.with_method("specache", bits=16, top=8).generate(prompts, max_new_tokens=80)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_logits_of_16_bits_are_those_of_full_kv(tiny: Engine, random_ids) -> None:
    snapshot = tiny.prefill(random_ids(150))
    runs = [tiny.with_method(name, **options).resume([snapshot], 30) for name, options in
            (("full_kv", {}), ("specache", {"bits": 16}))]  # fmt: skip
    for full, low in zip(*(run.steps for run in runs), strict=True):
        torch.testing.assert_close(low.logits_BV, full.logits_BV, rtol=1e-4, atol=1e-4)


def test_ragged_batch_equals_single_sequences(tiny: Engine, random_ids) -> None:
    prompts = [random_ids(n, n) for n in (3, 64, 190)]
    engine = tiny.with_method("specache", top=8)
    for prompt, together in zip(prompts, engine.generate(prompts, max_new_tokens=70), strict=True):
        assert together.token_ids == engine.generate([prompt], max_new_tokens=70)[0].token_ids


def test_exact_tokens_make_the_logits_better(tiny: Engine, random_ids) -> None:
    """Teacher-forced with full KV's tokens: the more exact tokens, the nearer to its logits."""
    snapshot = tiny.prefill(random_ids(600))
    truth = list(tiny.with_method("full_kv").resume([snapshot], 20).steps)
    tokens = [int(snapshot.logits_V.argmax()), *(step.token_B[0] for step in truth)]

    def teacher(logits_BRV: Tensor, position_B: Tensor) -> Tensor:
        at = position_B[:, None] - 599 + torch.arange(logits_BRV.shape[1])
        return torch.tensor(tokens)[at.clamp(max=len(tokens) - 1)]

    errors = []
    for top in (1, 64, 512):
        run = tiny.with_method("specache", top=top).resume([snapshot], 20, choose=teacher)
        errors.append(sum((a.logits_BV - b.logits_BV).norm() for a, b in zip(run.steps, truth, strict=True)))
    assert errors[0] > 1.5 * errors[1] > 1.5 * 1.5 * errors[2]


def test_real_tensors(smollm2: Engine, manual) -> None:
    """A layer's own queries, keys and values of real text: sets and outputs of both kinds of step."""
    q_THD, _, k_TKD, v_TKD = smollm2.prefill(manual(460)).layers[14]
    config, prompt = SpeCacheConfig(top=16), 440
    model = ModelConfig("one-layer", 1, 576, 8, 9, 3, 64, 16, 8192)
    method = SpeCache(model, config, batch=1, context=470, dtype=torch.float32)
    method.prefill_layer(0, 0, q_THD[:prompt], k_TKD[:prompt], k_TKD[:prompt], v_TKD[:prompt])
    heads = [Head(config, *(list(t[:prompt, h].double().numpy()) for t in (k_TKD, v_TKD))) for h in range(3)]
    for number in range(14):
        at = slice(prompt + max(0, number - 1), prompt + max(0, number - 1) + (2 if number else 1))
        commit = torch.tensor([number > 0])
        method.begin_step(at.stop - at.start, commit)
        output_RHD = method.attend(0, q_THD[None, at], k_TKD[None, at], v_TKD[None, at])[0]
        method.end_step()
        for h, head in enumerate(heads):
            own = (q_THD[at, 3 * h : 3 * h + 3], k_TKD[at, h], v_TKD[at, h])
            expected = head.step(*(t.double().numpy() for t in own), bool(commit))
            assert_allclose(output_RHD[:, 3 * h : 3 * h + 3].numpy(), expected, rtol=1e-3, atol=1e-4)
            assert set(method.layers[0].chosen_BKS[0, h].tolist()) - {-1} == head.exact
            assert head.exact


def test_a_needle_far_back_is_found(smollm2: Engine) -> None:
    sampler = Sampler(smollm2.tokenizer, folder=None)
    samples = [sampler.sample("niah_single_1", 1024, index) for index in range(3)]
    engine = smollm2.with_method("specache")
    answers = engine.generate([list(s.token_ids) for s in samples], max_new_tokens=samples[0].new_tokens)
    assert [score(c.text, s.answers) for c, s in zip(answers, samples, strict=True)] == [100.0] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("bits", 3), ("bits", 8), ("group", 0), ("top", 0), ("top", 2000), ("host_sequences", -1), ("bits", "2")],
)
def test_bad_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field}="):
        method_config("specache", {field: value})
