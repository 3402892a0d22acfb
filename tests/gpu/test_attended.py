"""The share of the true set on a GPU: after replayed steps, on the streams that the tables are written by."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments import method_time
from experiments.harness.gpu import LinkRate

pytestmark = pytest.mark.gpu
CONF = Path(__file__).resolve().parents[2] / "conf"
SMALL = ("model=tiny", "context=2048", "batch=3", "budget=256", "warmup=2", "steps=6")


def row_of(device: str, *overrides: str) -> dict:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("method_time", [*SMALL, *overrides])
    return method_time.measure_on(cfg, device, 1e12, LinkRate(1e10, "made up"))


@pytest.mark.parametrize("name", ["dualdecoder", "shadowkv", "quest", "oasiskv_no_cap"])
def test_steps_from_a_graph_attend_to_all_of_a_seeded_set(name: str) -> None:
    row = row_of("cuda", f"method={name}")
    assert row["graph"] and row["attended_share"] == 1.0


@pytest.mark.parametrize("name", ["oasiskv", "infinigen"])
def test_a_share_below_1_is_that_of_the_cpu(name: str) -> None:
    """Keys and queries are other random numbers there, so it is only about the same."""
    row, expected = (row_of(device, f"method={name}") for device in ("cuda", "cpu"))
    assert row["graph"] and 0 < row["attended_share"] < 0.99
    assert row["attended_share"] == pytest.approx(expected["attended_share"], abs=0.15)


@pytest.mark.parametrize("name", ["full_kv", "specache", "h2o"])
def test_what_is_not_measured_costs_no_step(name: str) -> None:
    row = row_of("cuda", f"method={name}")
    assert row["attended_share"] == (None if name == "h2o" else 1.0)
