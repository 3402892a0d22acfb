"""Engines and prompts shared by all tests. The real model is the embedded SmolLM2."""

import interpreter  # noqa: F401  # sets the mode of Triton
import pytest
import torch
from hypothesis import HealthCheck, settings
from support import sharpened
from watchdog import pytest_timeout_set_timer  # noqa: F401  # a hook

from dualdecoder.checkpoints import load_model
from dualdecoder.engine import Engine
from dualdecoder.method import method_config
from experiments.harness.workload import manual_prompt

# A busy machine makes a correct example slow; how long tests take is not what they test.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


@pytest.fixture(scope="session")
def smollm2() -> Engine:
    return Engine.from_pretrained("smollm2", method="full_kv")


@pytest.fixture(scope="session")
def manual(smollm2: Engine):
    """manual(n): the first n token ids of real technical English."""
    return lambda tokens: manual_prompt(smollm2, tokens)


@pytest.fixture(scope="session")
def tiny() -> Engine:
    """A random model of 4 layers; no tokenizer, prompts are token ids."""
    return Engine(sharpened(load_model("random:tiny")), None, "full_kv", method_config("full_kv", {}))


@pytest.fixture
def random_ids():
    """random_ids(n, seed): n token ids for the tiny model."""

    def draw(tokens: int, seed: int = 0) -> list[int]:
        return torch.randint(512, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()

    return draw
