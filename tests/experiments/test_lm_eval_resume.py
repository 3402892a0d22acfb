"""Finished requests of lm-eval: used again by the same model alone, wherever it lies and however it was loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance

from dualdecoder.engine import Engine
from experiments import lm_eval_model
from experiments.lm_eval_model import DualDecoderLM

PAIRS = [("One two", " three"), ("A cat is", " an animal"), ("", "Hello")]
Answers = list[tuple[float, bool]]


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """How many pairs a model was asked for, call by call."""
    sizes: list[int] = []
    scores = lm_eval_model.scores

    def counted(engine: Engine, pairs: list) -> Answers:
        sizes.append(len(pairs))
        return scores(engine, pairs)

    monkeypatch.setattr(lm_eval_model, "scores", counted)
    return sizes


def answers(kept: Path, *pairs: tuple[str, str], **settings: object) -> Answers:
    model = DualDecoderLM(resume=str(kept), batch_size=4, **settings)
    return model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs or PAIRS])


def test_a_stopped_run_goes_on_after_what_it_has(folder: Path, tmp_path: Path, asked: list[int]) -> None:
    kept = tmp_path / "deeper" / "kept.jsonl"
    first = answers(kept, *PAIRS[:2], model=str(folder), method="full_kv")
    # A process that is killed may leave half a line.
    with kept.open("a") as file:
        file.write('["half')
    again = answers(kept, model=str(folder), method="full_kv")
    assert again[:2] == first and asked == [2, 1]
    assert answers(kept, model=str(folder), method="full_kv") == again and asked == [2, 1]


def test_weights_written_over_others_are_asked_anew(
    write: Callable[[Path, int], None], tmp_path: Path, asked: list[int]
) -> None:
    kept, model = tmp_path / "kept.jsonl", tmp_path / "model"
    write(model, 0)
    first = answers(kept, model=str(model), method="full_kv")
    write(model, 7)
    second = answers(kept, model=str(model), method="full_kv")
    assert asked == [3, 3] and all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(first, second, strict=True))
    write(model, 0)
    assert answers(kept, model=str(model), method="full_kv") == first and asked == [3, 3]


def test_the_same_weights_elsewhere_are_not_asked_again(folder: Path, tmp_path: Path, asked: list[int]) -> None:
    kept, copy = tmp_path / "kept.jsonl", tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert answers(kept, model=str(folder), method="full_kv") == answers(kept, model=str(copy), method="full_kv")
    assert asked == [3]


def test_an_engine_made_by_hand_is_known_by_its_weights(
    folder: Path, write: Callable[[Path, int], None], tmp_path: Path, asked: list[int]
) -> None:
    """The name that is given beside it means nothing."""
    kept = tmp_path / "kept.jsonl"
    write(tmp_path / "other", 7)
    one, same, other = (
        Engine.from_pretrained(str(path), method="full_kv") for path in (folder, folder, tmp_path / "other")
    )
    first = answers(kept, model="mine", engine=one)
    assert answers(kept, model="mine", engine=same) == answers(kept, model="yours", engine=one) == first
    assert asked == [3]
    assert answers(kept, model="mine", engine=other) != first and asked == [3, 3]


def test_methods_and_options_do_not_share_answers(folder: Path, tmp_path: Path, asked: list[int]) -> None:
    kept = tmp_path / "kept.jsonl"
    for settings in ({"method": "full_kv"}, {"method": "dualdecoder"}, {"method": "dualdecoder", "budget": 64}):
        answers(kept, model=str(folder), **settings)
    answers(kept, model=str(folder), method="full_kv", dtype="bfloat16")
    assert asked == [3, 3, 3, 3]
