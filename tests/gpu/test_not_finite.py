"""Numbers that are not finite end a run on a GPU too, eager and replayed from a graph."""

import pytest
import torch
from support import new_token, sharpened, with_bad_token

from dualdecoder import graphs
from dualdecoder.checkpoints import load_model
from dualdecoder.config import SamplingConfig
from dualdecoder.engine import GREEDY, Engine
from dualdecoder.errors import NotFiniteError
from dualdecoder.method import method_config

pytestmark = pytest.mark.gpu
NEW = 24


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(512, (n,), generator=generator).tolist() for n in (120, 90)]


@pytest.mark.parametrize("warmup", [graphs.WARMUP_STEPS, 10**9], ids=["graph", "eager"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=0.7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["full_kv", "dualdecoder"])
def test_in_the_middle_of_decoding(
    prompts: list[list[int]], method: str, sampling: SamplingConfig, warmup: int, monkeypatch
) -> None:
    """All tokens before are right, and the error names the second of two sequences."""
    monkeypatch.setattr(graphs, "WARMUP_STEPS", warmup)
    model = sharpened(load_model("random:tiny")).to("cuda", torch.float32)
    engine = Engine(model, None, method, method_config(method, {}))
    good = [completion.token_ids for completion in engine.generate(prompts, NEW, sampling)]
    place = new_token(good[1], 8, good[0] + prompts[0] + prompts[1])
    got: list[list[int]] = [[], []]
    with pytest.raises(NotFiniteError, match=r"^sequence 1: "):
        for event in with_bad_token(engine, good[1][place]).stream(prompts, NEW, sampling):
            got[event.sequence].append(event.token_id)
    # A speculated row that is not finite may end the run a step earlier.
    assert len(got[1]) in (place, place + 1)
    assert got == [tokens[: len(got[1])] for tokens in good]


def test_in_the_prefill(prompts: list[list[int]]) -> None:
    bad = next(token for token in prompts[1] if token not in prompts[0])
    model = sharpened(load_model("random:tiny")).to("cuda", torch.float32)
    engine = with_bad_token(Engine(model, None, "dualdecoder", method_config("dualdecoder", {})), bad)
    with pytest.raises(NotFiniteError, match=r"^sequence 1: "):
        engine.generate(prompts, 2)
