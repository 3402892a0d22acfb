"""Full KV and full offload against softmax over lists of tokens, and against each other through the whole engine."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.method import KVMethod, method_class, method_config

METHODS = ("full_kv", "full_offload")
CAPACITY = 40


def make(name: str, layers: int, batch: int, **options: object) -> KVMethod:
    model = ModelConfig("toy", layers, 24, 40, 6, 2, 10, 50, 4096)
    config = method_config(name, options)
    return method_class(name)(model, config, batch=batch, context=CAPACITY, dtype=torch.float32)


@dataclass
class Lists:
    """What each layer of each sequence holds, as a list of (key, value) of one token, ``[K, D]`` each."""

    layers: int
    batch: int
    tokens: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def attend(self, layer: int, b: int, q_HD: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        """Softmax over the tokens so far and the token itself, head by head."""
        k_TKD, v_TKD = (torch.stack(part) for part in zip(*self.tokens[layer, b], own, strict=True))
        outputs = []
        for head, q_D in enumerate(q_HD):
            kv_head = head * k_TKD.shape[1] // len(q_HD)
            weight_T = torch.softmax(k_TKD[:, kv_head] @ q_D / math.sqrt(len(q_D)), dim=0)
            outputs.append(weight_T @ v_TKD[:, kv_head])
        return torch.stack(outputs)


def prefilled(method: KVMethod, lengths: list[int], g: torch.Generator) -> Lists:
    lists = Lists(method.model.layers, len(lengths))
    for b, length in enumerate(lengths):
        for layer in range(lists.layers):
            k_TKD, v_TKD = (torch.randn(length, 2, 10, generator=g) for _ in range(2))
            method.prefill_layer(b, layer, torch.randn(length, 6, 10, generator=g), k_TKD, k_TKD, v_TKD)
            lists.tokens[layer, b] = list(zip(k_TKD, v_TKD, strict=True))
    return lists


@settings(max_examples=25)
@given(
    name=st.sampled_from(METHODS),
    layers=st.integers(2, 5),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    masks=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6),
    seed=st.integers(0, 999),
)
def test_steps_equal_softmax_over_lists(name, layers, lengths, masks, seed) -> None:
    """Ragged sequences, of which any may or may not commit in any step, with even and odd numbers of layers."""
    g, batch = torch.Generator().manual_seed(seed), len(lengths)
    method = make(name, layers, batch)
    lists = prefilled(method, lengths, g)
    for mask in masks:
        commit_B = torch.tensor(mask[:batch])
        method.begin_step(1, commit_B)
        for layer in range(layers):
            q, k, v = (torch.randn(batch, 1, heads, 10, generator=g) for heads in (6, 2, 2))
            got = method.attend(layer, q, k, v)
            for b in range(batch):
                own = (k[b, 0], v[b, 0])
                torch.testing.assert_close(got[b, 0], lists.attend(layer, b, q[b, 0], own), atol=1e-5, rtol=1e-5)
                if commit_B[b]:
                    lists.tokens[layer, b].append(own)
        method.end_step()
    assert method.length_B.tolist() == [len(lists.tokens[0, b]) for b in range(batch)]
    assert method.read_bytes() == sum(method.length_B.tolist()) * layers * 2 * 2 * 10 * 4


def test_offloaded_steps_are_those_of_full_kv(tiny: Engine, random_ids) -> None:
    """Every logit of a ragged batch that outlives one of its sequences, bit by bit."""
    prompts = [random_ids(n, n) for n in (90, 61, 7)]
    runs = [tiny.with_method(name).start(prompts, 12) for name in METHODS]
    for full, offloaded in zip(runs[0].steps, runs[1].steps, strict=True):
        assert full.token_B == offloaded.token_B
        assert torch.equal(full.logits_BV, offloaded.logits_BV)
    copied = runs[1].method.statistics()["prefetched_bytes"]
    assert copied == 11 * 3 * (90 + 12) * tiny.model.config.layers * 2 * 2 * 16 * 4


def test_an_odd_number_of_layers_is_not_put_into_a_graph() -> None:
    assert [make("full_offload", layers, 1).graphable for layers in (2, 3, 4)] == [True, False, True]
    with pytest.raises(ConfigError, match=r"model\.layers=1"):
        make("full_offload", 1, 1)


@pytest.mark.parametrize("host_sequences", [1, 2, 9])
def test_fewer_host_sequences_serve_all(host_sequences: int) -> None:
    """Only for timing: the bytes that cross are the same, the host's memory is less."""
    method = make("full_offload", 2, 3, host_sequences=host_sequences)
    shared = min(host_sequences, 3)
    plan = method.ledger.plan()
    assert plan.host["kv"] == shared * plan.gpu["buffers"] // 3
    method.fill_synthetic(20)
    method.begin_step(1, torch.zeros(3, dtype=torch.bool))
    for b in range(3):
        assert torch.equal(method.buffers[0][b], method.host.kv[0][b % shared])
        assert torch.equal(method.buffers[1][b], method.host.kv[1][b % shared])


def test_without_transfers_nothing_crosses() -> None:
    method = make("full_offload", 2, 2)
    method.fill_synthetic(20)
    host = [kv.clone() for kv in method.host.kv]
    method.transfers = False
    method.begin_step(1, torch.ones(2, dtype=torch.bool))
    for layer in range(2):
        method.attend(layer, *(torch.ones(2, 1, heads, 10) for heads in (6, 2, 2)))
    method.end_step()
    assert method.statistics() == {"urgent_bytes": 0, "prefetched_bytes": 0}
    assert all(torch.equal(now, before) for now, before in zip(method.host.kv, host, strict=True))
    assert not any(buffer[:, :, :, :20].any() for buffer in method.buffers)


@pytest.mark.parametrize("name", METHODS)
def test_synthetic_lengths_stay_within_the_capacity(name: str) -> None:
    with pytest.raises(ConfigError, match=f"tokens={CAPACITY}"):
        make(name, 2, 1).fill_synthetic(CAPACITY)


def test_a_new_prompt_after_steps_is_read_again() -> None:
    """The copies of the first two layers that are under way between steps are not taken for a new prompt's."""
    method, g = make("full_offload", 2, 1), torch.Generator().manual_seed(0)
    for _ in range(2):
        lists = prefilled(method, [9], g)
        method.begin_step(1, torch.ones(1, dtype=torch.bool))
        for layer in range(2):
            q, k, v = (torch.randn(1, 1, heads, 10, generator=g) for heads in (6, 2, 2))
            expected = lists.attend(layer, 0, q[0, 0], (k[0, 0], v[0, 0]))
            torch.testing.assert_close(method.attend(layer, q, k, v)[0, 0], expected, atol=1e-5, rtol=1e-5)
        method.end_step()
