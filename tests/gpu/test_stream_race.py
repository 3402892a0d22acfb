"""Random naps on every side stream and around every wait: no method may give other bits, eager or from a graph.

A wait that is missing shows only when streams happen to overlap; naps make them overlap in ever other ways.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch
from support import Trace, assert_bit_equal, sharpened
from torch import Tensor

from dualdecoder import graphs
from dualdecoder.checkpoints import load_model
from dualdecoder.engine import Engine
from dualdecoder.graphs import StepRunner
from dualdecoder.method import REGISTRY, method_class, method_config
from dualdecoder.model import Decoder
from dualdecoder.prefill import PrefillSnapshot
from dualdecoder.selection_replay import ReplayConfig, replay_selection
from dualdecoder.transfer import SideStream

pytestmark = pytest.mark.gpu

# Some 0.3 ms of an H200's clock: several layers of the tiny model.
LONGEST_NAP = 600_000
# Enough for a flush of DualDecoder's window, from the end of which a prompt is up to 16 tokens away.
STEPS = 18
ONE_STREAM = {"full_kv", "streaming_llm", "h2o", "quest"}
DUAL = {"budget": 64, "window": 48}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("full_kv", {}),
    ("streaming_llm", {}),
    ("h2o", {"heavy": 40, "recent": 30}),
    ("quest", {"budget": 64}),
    ("full_offload", {}),
    ("infinigen", {"cap": 40, "dense_layers": 1}),
    ("infinigen", {"cap": 40, "dense_layers": 2}),
    ("oasiskv", {"budget": 64}),
    ("oasiskv", {"budget": 64, "draft": "already loaded"}),
    ("shadowkv", {"budget": 64, "rank": 16, "generated": 64}),
    ("specache", {"bits": 1}),
    ("specache", {"bits": 2, "group": 16, "top": 24}),
    *(("dualdecoder", {**DUAL, "urgent": u, "schedule": s})
      for u in ("gather", "in_place") for s in ("layer_aware", "on_demand")),
    ("dualdecoder", {**DUAL, "speculation": "none"}),
]  # fmt: skip
# Batches, and whether selections are made in two halves, which by itself begins far beyond this model. Both sides of
# two more switches: ShadowKV's two parts begin at 8, and the top of 34 sequences with two rows and two KV heads takes
# more programs than an H200 has multiprocessors.
BATCHES = [(7, False), (8, True), (33, False), (34, False)]


class Naps:
    """Kernels that only wait, of random length, at half of the places where one may be; none without a seed."""

    def __init__(self) -> None:
        self.random: random.Random | None = None
        self.taken = 0

    def seed(self, seed: int | None) -> None:
        self.random, self.taken = None if seed is None else random.Random(seed), 0

    def maybe(self) -> None:
        """On the current stream."""
        if self.random is not None and self.random.random() < 0.5:
            torch.cuda._sleep(self.random.randrange(1, LONGEST_NAP))
            self.taken += 1


@pytest.fixture
def naps(monkeypatch) -> Naps:
    """Naps before and after each piece of work of a side stream, and before and after each wait for one."""
    naps, work, wait = Naps(), SideStream.work, SideStream.wait

    @contextmanager
    def work_and_nap(side: SideStream, key: Any = 0, follow: bool = True) -> Iterator[None]:
        with work(side, key, follow):
            naps.maybe()
            yield
            naps.maybe()

    def wait_and_nap(side: SideStream, key: Any = 0) -> None:
        naps.maybe()
        wait(side, key)
        naps.maybe()

    monkeypatch.setattr(SideStream, "work", work_and_nap)
    monkeypatch.setattr(SideStream, "wait", wait_and_nap)
    return naps


@pytest.fixture(scope="module")
def model() -> Decoder:
    return sharpened(load_model("random:tiny")).to("cuda", torch.float32)


@pytest.fixture(scope="module")
def snapshots(model: Decoder) -> list[PrefillSnapshot]:
    """Ragged prompts, prefilled once for all methods."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(150, 400, (max(batch for batch, _ in BATCHES),), generator=generator).tolist()
    prompts = [torch.randint(512, (tokens,), generator=generator).tolist() for tokens in lengths]
    return [PrefillSnapshot.take(model, prompt) for prompt in prompts]


def halve_selections(monkeypatch, halved: bool) -> None:
    # By name: importing kernels here would import Triton before the kernels' tests have said how.
    monkeypatch.setattr("dualdecoder.kernels.selection.HALVED_LOGITS", 0 if halved else 2**62)


def run_eagerly(monkeypatch, eager: bool) -> None:
    monkeypatch.setattr(graphs, "WARMUP_STEPS", 10**9 if eager else 2)


def assert_naps_change_nothing(run: Callable[[], Trace], naps: Naps, monkeypatch, has_streams: bool) -> None:
    """``run`` gives the bits of its eager steps without a nap also with naps, eager and from a graph."""
    run_eagerly(monkeypatch, True)
    naps.seed(None)
    expected = run()
    # Without side streams there is no nap, and the other runs would be the same again.
    for seed, eager in enumerate((True, False, False) if has_streams else (False,)):
        run_eagerly(monkeypatch, eager)
        naps.seed(seed)
        assert_bit_equal(run(), expected)
        assert bool(naps.taken) == has_streams


def test_every_method_is_here() -> None:
    assert {name for name, _ in CASES} == set(REGISTRY)


@pytest.mark.parametrize("batch, halved", BATCHES)
@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_naps_change_no_bit(name, options, batch: int, halved: bool, model, snapshots, naps, monkeypatch) -> None:
    halve_selections(monkeypatch, halved)
    engine = Engine(model, None, name, method_config(name, options))
    engine.draft = model

    def run() -> Trace:
        result = Trace()
        for step in engine.resume(snapshots[:batch], STEPS).steps:
            result.logits.append(step.logits_BV.clone())
            result.tokens.append(step.token_B)
        return result

    assert_naps_change_nothing(run, naps, monkeypatch, name not in ONE_STREAM)


@pytest.mark.parametrize("batch, halved", BATCHES[:2])
@pytest.mark.parametrize("name", ["quest", "oasiskv", "shadowkv", "dualdecoder"])
def test_naps_change_no_bit_of_a_replayed_selection(name: str, batch: int, halved: bool, model, naps, monkeypatch):
    """OasisKV asks for the replaced sets on a side stream, the others on the compute stream."""
    halve_selections(monkeypatch, halved)

    def run() -> Trace:
        sizes = {"batch": batch, "context": 1100, "dtype": torch.float32, "device": "cuda"}
        method = method_class(name)(model.config, method_config(name, {"budget": 64}), **sizes)
        method.fill_synthetic(1000)
        replay_selection(method, ReplayConfig())
        return Trace(logits=list(islice(synthetic_steps(model, method), STEPS)))

    assert_naps_change_nothing(run, naps, monkeypatch, name not in ONE_STREAM)


def synthetic_steps(model: Decoder, method) -> Iterator[Tensor]:
    step = StepRunner(model, method)
    tokens_BR = torch.arange(method.batch * method.rows, device="cuda").view(method.batch, method.rows)
    everyone_B = torch.ones(method.batch, dtype=torch.bool, device="cuda")
    while True:
        yield step(tokens_BR, method.length_B, everyone_B)


def test_naps_find_a_list_that_layers_share(model, snapshots, monkeypatch) -> None:
    """The fault that these tests were written for, put back: late copies read the list of a layer further on."""
    from baselines.kernels.specache_ops import TritonOps

    fetch = TritonOps.fetch

    def fetch_late(*arguments: Any) -> None:
        torch.cuda._sleep(10 * LONGEST_NAP)
        fetch(*arguments)

    engine = Engine(model, None, "specache", method_config("specache", {}))

    def logits(shared: bool) -> Tensor:
        run = engine.resume(snapshots[:5], 10)
        if shared:
            for fetches in run.method.ops.fetches:
                fetches.entries = run.method.ops.fetches[0].entries
        return torch.stack([step.logits_BV.clone() for step in run.steps])

    expected = logits(shared=False)
    monkeypatch.setattr(TritonOps, "fetch", fetch_late)
    assert torch.equal(logits(shared=False), expected)
    assert not torch.equal(logits(shared=True), expected)
