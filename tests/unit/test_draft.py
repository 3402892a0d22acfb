"""A draft model gives the speculated token: its own greedy continuation of the true text, and never the result."""

import pytest
import torch

from dualdecoder.checkpoints import load_model
from dualdecoder.config import ModelConfig
from dualdecoder.draft import DraftSpeculator
from dualdecoder.engine import Engine
from dualdecoder.errors import CapacityError, ConfigError
from dualdecoder.model import Decoder, random_decoder
from dualdecoder.prefill import PrefillSnapshot

DRAFT = ModelConfig("small", 2, 32, 48, 2, 1, 16, 512, 300)
COVERING = {"budget": 256}


@pytest.fixture(scope="module")
def draft() -> Decoder:
    model = random_decoder(DRAFT, seed=7)
    model.embedding_VE *= 50  # so that tokens tell
    return model


def test_it_continues_the_true_text(draft: Decoder, random_ids) -> None:
    """Ragged prompts; a sequence that has ended takes no more tokens."""
    texts = [random_ids(20, 1), random_ids(9, 2)]
    speculator = DraftSpeculator(draft, 512, texts, context=40)
    for step in range(8):
        token_B, active_B = torch.tensor(random_ids(2, 50 + step)), torch.tensor([True, step < 5])
        ignored_B = torch.zeros_like(token_B)
        guess_B = (speculator.following if step else speculator.first)(token_B, ignored_B, active_B)
        for b in active_B.nonzero().flatten().tolist():
            texts[b] = [*texts[b], int(token_B[b])]
            assert guess_B[b] == PrefillSnapshot.take(draft, texts[b]).logits_V.argmax()
    assert speculator.length_B.tolist() == [28, 14]


def test_a_draft_that_is_the_model_is_always_right(random_ids) -> None:
    engine = Engine.from_pretrained("random:tiny", method="oasiskv", draft="random:tiny", **COVERING)
    prompts = [random_ids(n, n) for n in (70, 33)]
    steps = list(engine.start(prompts, 30).steps)
    assert len(steps) == 29
    assert all(all(step.speculated) for step in steps)


def test_any_draft_gives_the_same_tokens_where_all_is_resident(tiny: Engine, draft: Decoder, random_ids) -> None:
    prompts = [random_ids(n, n) for n in (130, 64, 5)]
    engine = tiny.with_method("oasiskv", draft="any name, for it is loaded already", **COVERING)
    engine.draft = draft
    assert engine.generate(prompts, 60) == tiny.generate(prompts, 60)
    speculated = [right for step in engine.start(prompts, 60).steps for right in step.speculated]
    assert not any(speculated)


def test_a_named_draft_is_loaded_once(random_ids) -> None:
    engine = Engine.from_pretrained("random:tiny", method="oasiskv", draft="random:tiny", **COVERING)
    engine.generate([random_ids(20)], 3)
    loaded = engine.draft
    engine.generate([random_ids(20)], 3)
    assert engine.draft is loaded is not engine.model
    assert torch.equal(loaded.embedding_VE, load_model("random:tiny").embedding_VE)


def test_drafts_that_cannot_follow_are_refused(tiny: Engine, draft: Decoder, random_ids) -> None:
    other = tiny.with_method("oasiskv", draft="random:smollm2-135m")
    with pytest.raises(ConfigError, match=r"draft=.*vocabulary 49152.*a vocabulary of 512"):
        other.generate([[1, 2, 3]], 4)
    engine = tiny.with_method("oasiskv", draft="small")
    engine.draft = draft
    with pytest.raises(CapacityError, match="draft: 304 tokens"):
        engine.generate([random_ids(300)], 4)
    with pytest.raises(ConfigError, match=r"draft=3.*str"):
        tiny.with_method("oasiskv", draft=3)
