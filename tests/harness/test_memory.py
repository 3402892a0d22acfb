"""The second point of a process finds the memory of the first: no measurement leaves its method behind."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dualdecoder.engine import Engine
from dualdecoder.method import REGISTRY, KVMethod
from experiments import method_time
from experiments.harness.child import answer
from experiments.harness.gpu import LinkRate
from experiments.harness.isolate import measure_here
from experiments.harness.memory import keep_last

CONF = Path(__file__).resolve().parents[2] / "conf"
SMALL = ("model=tiny", "batch=2", "budget=64", "warmup=1", "steps=2")


@pytest.fixture
def methods(monkeypatch) -> Iterator[list[weakref.ref]]:
    """Every method that is made, weakly; the collector of cycles is off, so that only the last reference frees."""
    made: list[weakref.ref] = []
    init = KVMethod.__init__

    def remember(self: KVMethod, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(KVMethod, "__init__", remember)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()


def measure_one(method: str, *overrides: str) -> list[dict]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("method_time", [*SMALL, f"method={method}", *overrides])
    return [method_time.measure_on(cfg, "cpu", 1e9, LinkRate(1e8, "made up"))]


def alive(methods: list[weakref.ref]) -> list[KVMethod]:
    assert methods, "none was made"
    return [method for ref in methods if (method := ref()) is not None]


@pytest.mark.parametrize("method", REGISTRY)
def test_a_timed_method_is_gone_when_its_point_ends(methods, method: str) -> None:
    """With a replayed selection where the method selects chunks."""
    for _ in range(2):
        measure_one(method, "context=512")
        assert not alive(methods)


@pytest.mark.parametrize("method", REGISTRY)
def test_a_decoded_method_is_gone_with_its_run(methods, method: str, tiny: Engine, random_ids) -> None:
    run = tiny.with_method(method).start([random_ids(200), random_ids(90)], 4)
    assert len(list(run.steps)) == 3
    del run
    assert not alive(methods)


def test_a_method_whose_step_fails_is_gone_as_well(methods, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for a step")

    monkeypatch.setattr(method_time, "time_steps", fail)
    found = answer(lambda cfg: measure_one("dualdecoder", "context=512"), {})
    assert found["error"]["kind"] == "memory"
    assert not alive(methods)


def test_what_only_a_cycle_holds_is_freed_before_the_next_point() -> None:
    """A library's cycles are nothing that we could break."""

    class Held:
        pass

    refs: list[weakref.ref] = []

    def measure(cfg) -> list[dict]:
        seen = [ref() is not None for ref in refs]
        held = Held()
        held.itself = held
        refs.append(weakref.ref(held))
        return [{"still there": seen}]

    gc.disable()
    try:
        rows = [measure_here(measure, OmegaConf.create({})).rows[0]["still there"] for _ in range(3)]
    finally:
        gc.enable()
    assert rows == [[], [False], [False, False]]


def test_the_last_model_is_let_go_before_the_next_is_loaded() -> None:
    class Model:
        pass

    refs: list[weakref.ref] = []

    @keep_last(key=lambda name: name)
    def load(name: str) -> Model:
        assert not any(ref() for ref in refs)
        model = Model()
        refs.append(weakref.ref(model))
        return model

    assert load("a") is load("a")
    load("b")
    load("a")
    assert len(refs) == 3
