"""Wherever a stream writes what another uses, the one waits for the other: of every method, without a GPU.

``tests/gpu/test_stream_race.py`` asks the same of a GPU, which answers for the orders that it meets only. A step that
leaves no work of its side streams behind is as well ordered in a CUDA graph as it is here: replays follow each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from stream_order import StreamOrder, watched_streams
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.kernels import selection
from dualdecoder.method import REGISTRY, KVMethod, method_class, method_config
from dualdecoder.model import Decoder, random_decoder
from dualdecoder.prefill import prefill_into
from dualdecoder.selection_replay import ReplayConfig, replay_selection
from dualdecoder.step import decode_step
from dualdecoder.transfer import SideStream

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="follows Triton's interpreter")

# Small, for the interpreter takes a millisecond for what a GPU does in a nanosecond.
SHAPE = ModelConfig("four-layers", 4, 8, 8, 2, 1, 16, 16, 4096)
# The first token of the decode completes a block of 16, and a group of as many.
PROMPT = 95
ONE_STREAM = {"full_kv", "streaming_llm", "h2o", "quest"}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("full_offload", {}, 1),
    ("infinigen", {"cap": 20, "dense_layers": 1}, 1),
    ("infinigen", {"cap": 20, "dense_layers": 2}, 1),
    ("oasiskv", {"budget": 32}, 1),
    ("shadowkv", {"budget": 16, "rank": 8, "generated": 16, "parts": 2}, 4),
    ("specache", {"group": 16, "top": 12}, 1),
    ("dualdecoder", {"budget": 16}, 2),
    ("dualdecoder", {"budget": 16, "urgent": "in_place"}, 1),
    ("dualdecoder", {"budget": 16, "schedule": "on_demand"}, 1),
]


def decoded(
    name: str, options: dict[str, Any], batch: int = 1, layers: int = SHAPE.layers, steps: int = 2,
    change: Callable[[KVMethod], Any] = lambda method: None,
) -> tuple[StreamOrder, KVMethod]:  # fmt: skip
    """Prompts and some steps of a method, on kernels and watched streams; ``change`` is made before all of them."""
    shape = replace(SHAPE, layers=layers)
    sizes = {"batch": batch, "context": PROMPT + 8, "dtype": torch.float32}
    model, everyone_B = random_decoder(shape, torch.float32), torch.ones(batch, dtype=torch.bool)
    with watched_streams() as order:
        method = method_class(name)(shape, method_config(name, options), **sizes, planned_for="cuda")
        change(method)
        for sequence in range(batch):
            prefill_into(model, method, sequence, [token % shape.vocabulary for token in range(PROMPT)])
        if method.rows == 2:
            step(order, model, method, 1, ~everyone_B)
        for _ in range(steps):
            step(order, model, method, method.rows, everyone_B)
    return order, method


def step(order: StreamOrder, model: Decoder, method: KVMethod, rows: int, commit_B: Tensor) -> None:
    tokens_BR = torch.ones(len(commit_B), rows, dtype=torch.int64)
    decode_step(model, method, tokens_BR, method.length_B.clone(), commit_B)
    order.end_of_step()


@pytest.mark.parametrize("name, options, batch", CASES, ids=str)
def test_all_accesses_are_ordered(name: str, options: dict[str, Any], batch: int, monkeypatch) -> None:
    """With more than one sequence also those of a selection in halves, which has a stream of its own."""
    monkeypatch.setattr(selection, "HALVED_LOGITS", 0)
    order, method = decoded(name, options, batch)
    assert order.races == set()
    statistics = method.statistics()
    assert statistics["urgent_bytes"] + statistics["prefetched_bytes"] > 0


@pytest.mark.parametrize("name, options", [("full_offload", {}), ("dualdecoder", {"budget": 16})], ids=str)
def test_buffers_that_swap_roles_between_steps(name: str, options: dict[str, Any]) -> None:
    assert decoded(name, options, layers=3)[0].races == set()


def test_a_flush_to_the_host() -> None:
    order, method = decoded("dualdecoder", {"budget": 4, "chunk": 1, "local": 1, "window": 3}, steps=3)
    assert order.races == set()
    assert method.chunks_B.item() > PROMPT - 1


def test_replaced_sets_that_are_made_on_a_side_stream() -> None:
    def replay(method: KVMethod) -> None:
        method.chunks_B.fill_(PROMPT // 16)
        replay_selection(method, ReplayConfig())

    assert decoded("oasiskv", {"budget": 32}, change=replay)[0].races == set()


def test_all_other_methods_have_one_stream() -> None:
    assert {name for name, *_ in CASES} | ONE_STREAM == set(REGISTRY)
    for name in ONE_STREAM:
        with watched_streams() as order:
            sizes = {"batch": 2, "context": 103, "dtype": torch.float32}
            method_class(name)(SHAPE, method_config(name, {}), **sizes, planned_for="cuda")
        assert order.sides == []


def share_lists(method: KVMethod) -> None:
    """As it was: all layers have the same entries."""
    for fetch in method.ops.fetches:
        fetch.entries = method.ops.fetches[0].entries


def share_lists_of_misses(method: KVMethod) -> None:
    for fetch in method.ops.expected:
        fetch.entries = method.ops.misses[0].entries


def forget_guesses(method: KVMethod) -> None:
    class Forgetful(dict):
        def __setitem__(self, key: Any, value: Any) -> None:
            pass

    method.guesses = Forgetful()


def let_go_of_queries(method: KVMethod) -> None:
    method.prediction.keep_alive = lambda tensor: None


def do_not_wait_for_half_of_a_selection(method: KVMethod) -> None:
    method.ops.selection.side.wait = lambda: None


@pytest.mark.parametrize(
    "name, options, change, race",
    [
        ("specache", {"group": 16, "top": 12}, share_lists,
         "_assign_slots_kernel on side stream 1 writes what _gather_kernel on side stream 2 may still use"),
        ("dualdecoder", {"budget": 16}, share_lists_of_misses,
         "_assign_slots_kernel on compute writes what _gather_kernel on side stream 3 may still use"),
        ("dualdecoder", {"budget": 16}, do_not_wait_for_half_of_a_selection,
         "_assign_slots_kernel on compute reads what _select_kernel on side stream 1 may still use"),
        ("infinigen", {"cap": 20}, forget_guesses,
         r"\S+ on compute is given memory that \S+ on side stream 2 may still use"),
        ("oasiskv", {"budget": 32}, let_go_of_queries,
         r"\S+ on compute is given memory that _bounds_kernel on side stream 1 may still use"),
    ],
)  # fmt: skip
def test_a_fault_is_found(name: str, options: dict[str, Any], change: Callable, race: str, monkeypatch) -> None:
    monkeypatch.setattr(selection, "HALVED_LOGITS", 0)
    batch = 2 if change is do_not_wait_for_half_of_a_selection else 1
    races = decoded(name, options, batch, change=change)[0].races
    assert any(re.fullmatch(race, found) for found in races)


@pytest.mark.parametrize("left_out", ["wait", "follow", "keep_alive"])
def test_nothing_that_orders_full_offload_can_be_left_out(left_out: str, monkeypatch) -> None:
    monkeypatch.setattr(SideStream, left_out, lambda side, *_: side._done.clear())
    assert decoded("full_offload", {})[0].races


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_orders_what_overlaps(waits: bool) -> None:
    with watched_streams() as order:
        side, table = SideStream(torch.device("cpu"), urgent=False), torch.zeros(4, 6)
        with side.work():
            table[:, ::2].fill_(1.0)
        table[:, 1::2].fill_(2.0)
        assert order.races == set(), "other elements of the same rows are other memory"
        if waits:
            side.wait()
        table[1:].sum()
    assert bool(order.races) == (not waits)


@pytest.mark.parametrize("kept", [True, False])
def test_memory_is_not_used_again_while_a_side_stream_reads_it(kept: bool) -> None:
    with watched_streams() as order:
        side, total = SideStream(torch.device("cpu"), urgent=False), torch.zeros(4)
        temporary = torch.ones(4)
        with side.work():
            total += temporary
        if kept:
            side.keep_alive(temporary)
        del temporary
        torch.ones(4)
    assert bool(order.races) == (not kept)
