"""A draft model beside OasisKV on a GPU."""

import pytest
from support import sharpened

from dualdecoder.checkpoints import load_model
from dualdecoder.engine import Engine
from dualdecoder.method import method_config

pytestmark = pytest.mark.gpu
OPTIONS = {"budget": 256, "draft": "already loaded"}


def test_a_draft_that_is_the_model_is_always_right_and_changes_nothing(random_ids) -> None:
    prompts = [random_ids(n, n) for n in (70, 33)]
    cpu = Engine(sharpened(load_model("random:tiny")), None, "full_kv", method_config("full_kv", {}))
    engine = Engine(cpu.model.to("cuda", cpu.model.dtype), None, "oasiskv", method_config("oasiskv", OPTIONS))
    engine.draft = engine.model
    assert [c.token_ids for c in engine.generate(prompts, 30)] == [c.token_ids for c in cpu.generate(prompts, 30)]
    steps = list(engine.start(prompts, 30).steps)
    assert len(steps) == 29
    assert all(all(step.speculated) for step in steps)
