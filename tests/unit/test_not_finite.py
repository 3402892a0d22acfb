"""Numbers that are not finite end a run with an error that names the sequence, the dtype and what to try."""

import pytest
import torch
from support import new_token, with_bad_token
from torch import Tensor

from dualdecoder import Engine
from dualdecoder.config import SamplingConfig
from dualdecoder.engine import GREEDY
from dualdecoder.errors import NotFiniteError, UserError
from dualdecoder.finite import finite_rows
from dualdecoder.method import REGISTRY, method_config
from experiments.harness.teacher import forced_logits
from experiments.lm_eval_scoring import scores

METHODS = {"full_kv": {}, "dualdecoder": {"speculation": "none"}, "shadowkv": {}, "h2o": {}}
SAMPLED = SamplingConfig(temperature=0.7, top_p=0.9)
NEW = 12


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_single_number_is_seen(value: float) -> None:
    logits_BV = torch.randn(4, 50)
    logits_BV[2, 17] = value
    assert finite_rows(logits_BV).tolist() == [True, True, False, True]


def test_the_largest_finite_numbers_are_finite() -> None:
    assert finite_rows(torch.full((1, 50), torch.finfo(torch.float32).max)).all()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_in_the_middle_of_decoding(tiny: Engine, random_ids, method: str, sampling: SamplingConfig) -> None:
    """All tokens before are right, and the error names the second of two sequences."""
    engine = tiny.with_method(method, **METHODS[method])
    prompts = [random_ids(70), random_ids(90, 1)]
    good = [completion.token_ids for completion in engine.generate(prompts, NEW, sampling)]
    place = new_token(good[1], 4, good[0] + prompts[0] + prompts[1])
    bad = good[1][place]
    got: list[list[int]] = [[], []]
    with pytest.raises(NotFiniteError, match=r"^sequence 1: .* not finite .* in float32; ") as error:
        for event in with_bad_token(engine, bad).stream(prompts, NEW, sampling):
            got[event.sequence].append(event.token_id)
    assert got[1] == good[1][: place + 1]
    assert got[0] == good[0][: place + 1]
    assert "\n" not in str(error.value)


def test_a_speculated_row_that_is_not_finite_ends_the_run_too(tiny: Engine, random_ids) -> None:
    """Never another token: the true row is computed beside it."""
    engine = tiny.with_method("dualdecoder")
    prompt = random_ids(90, 1)
    good = engine.generate([prompt], NEW)[0].token_ids
    place = new_token(good, 4, prompt)
    got: list[int] = []
    with pytest.raises(NotFiniteError, match="sequence 0"):
        got.extend(event.token_id for event in with_bad_token(engine, good[place]).stream([prompt], NEW))
    assert got == good[: len(got)]
    assert len(got) in (place, place + 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_has_ended_does_not_matter(tiny: Engine, random_ids, method: str) -> None:
    """What is computed for it afterwards is nobody's answer."""
    engine = tiny.with_method(method, **METHODS[method])
    prompts = [random_ids(70), random_ids(90, 1)]
    good = [completion.token_ids for completion in engine.generate(prompts, NEW)]
    bad = good[1][new_token(good[1], 4, good[0] + prompts[0] + prompts[1])]
    broken = with_bad_token(engine, bad)
    stopping = Engine(broken.model, None, method, engine.config, stop_ids=[bad])
    short = good[1][: good[1].index(bad) + 1]
    assert [completion.token_ids for completion in stopping.generate(prompts, NEW)] == [good[0], short]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", sorted(REGISTRY))
def test_in_the_prefill(tiny: Engine, random_ids, method: str, value: float) -> None:
    prompts = [random_ids(300), [*random_ids(200, 1), 7, *random_ids(80, 2)]]
    assert 7 not in prompts[0]
    engine = with_bad_token(tiny.with_method(method), 7, value)
    with pytest.raises(NotFiniteError, match=r"^sequence 1: .* in float32"):
        engine.generate(prompts, 2)


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.float16, "bfloat16 or float32"), (torch.bfloat16, "try dtype float32")]
)
def test_the_dtype_says_what_to_try(tiny: Engine, dtype: torch.dtype, advice: str) -> None:
    """A model whose MLP overflows."""
    model = tiny.model.to("cpu", dtype)
    for layer in model.layers:
        layer.gate_up_2FE = layer.gate_up_2FE * 1e3
        layer.down_EF = layer.down_EF * (1e4 if dtype == torch.float16 else 1e38)
    engine = Engine(model, None, "full_kv", method_config("full_kv", {}))
    with pytest.raises(UserError, match=rf"sequence 0: .* in {str(dtype)[6:]}; .*{advice}"):
        engine.generate([[1, 2, 3]], 4)


def test_a_snapshot_and_forced_text(tiny: Engine, random_ids) -> None:
    """The ways of fidelity and log-likelihoods: no distribution of NaN is handed on."""
    text = random_ids(60)
    engine = with_bad_token(tiny, text[40])
    place = text.index(text[40])
    with pytest.raises(NotFiniteError):
        engine.prefill(text)
    seen: list[Tensor] = []
    with pytest.raises(NotFiniteError):
        seen.extend(forced_logits(engine, [engine.prefill(text[:5])], [text[5:]]))
    assert len(seen) == place - 5 + 1
    assert all(logits_BV.isfinite().all() for logits_BV in seen)


@pytest.mark.parametrize("method", ["full_kv", "dualdecoder"])
def test_no_log_likelihood_of_numbers_that_are_not_finite(tiny: Engine, random_ids, method: str) -> None:
    """An exact method scores from one prefill, which has no sampler that would notice."""
    engine = tiny.with_method(method)
    context, continuation = random_ids(40), random_ids(6, 1)
    assert scores(engine, [(context, continuation)])[0][0] < 0
    with pytest.raises(NotFiniteError, match="in float32"):
        scores(with_bad_token(engine, continuation[2]), [(context, continuation)])
