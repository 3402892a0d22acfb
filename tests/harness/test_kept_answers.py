"""Answers that are kept: found again after a crash, never given to another model, never in the way."""

import dataclasses
import errno
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dualdecoder.checkpoints import load_tokenizer
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.model import Decoder
from experiments.harness import identity, kept_answers
from experiments.harness.identity import answers_identity, weights_digest
from experiments.harness.kept_answers import KeptAnswers


def ask(kept: KeptAnswers, *items: str) -> list[str]:
    """What was asked for: the items that were not kept."""
    asked: list[str] = []
    found = kept.answer_all("k", items, lambda group: asked.extend(group) or [f"<{item}>" for item in group], 2, len)
    assert found == [f"<{item}>" for item in items]
    return asked


def test_a_line_torn_at_any_byte_costs_its_own_answer_alone(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    ask(KeptAnswers(whole, "me"), "a", "b")
    content = whole.read_bytes()
    last = content.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(last, len(content) + 1):
        torn = tmp_path / f"torn-{end}"
        torn.write_bytes(content[:end])
        lost = [] if end >= len(content) - 1 else ["b"]
        assert ask(KeptAnswers(torn, "me"), "a", "b", "c") == [*lost, "c"], end
        assert ask(KeptAnswers(torn, "me"), "c", "b", "a") == [], end


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"5",
        b'"ab"',
        b'["a", "b", "c"]',
        b"[1, 2]",
        b'["key", null]',
        b'["key", [1.5, 2]]',
        b'["key", {"deep": 1}]',
        b'["key", ' + b"9" * 5000 + b"]",
        b"",
    ],
)
def test_lines_that_hold_no_answer_are_passed_over(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "kept"
    ask(KeptAnswers(path, "me"), "a")
    path.write_bytes(line + b"\n" + path.read_bytes() + line)
    kept = KeptAnswers(path, "me")
    assert len(kept.known) == 1
    assert ask(kept, "a", "b") == ["b"]
    assert ask(KeptAnswers(path, "me"), "a", "b") == []


def test_several_writers_keep_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    items = [[f"{writer}-{number}-" + "long " * 5000 for number in range(12)] for writer in range(6)]
    writers = [threading.Thread(target=ask, args=(KeptAnswers(path, "me"), *mine)) for mine in items]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert ask(KeptAnswers(path, "me"), *(item for mine in items for item in mine)) == []


PROGRAM = """
import os, signal, sys
from pathlib import Path
from experiments.harness.kept_answers import KeptAnswers

def answer(group):
    if "c" in group:
        os.kill(os.getpid(), signal.SIGKILL)
    return [f"<{item}>" for item in group]

KeptAnswers(Path(sys.argv[1]), "me").answer_all("k", ["a", "b", "c", "d"], answer, 1, str)
"""


def test_a_killed_process_costs_the_batch_under_way(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "kept"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -9
    assert ask(KeptAnswers(path, "me"), "a", "b", "c", "d") == ["c", "d"]


def test_answers_of_another_identity_stay_and_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    assert ask(KeptAnswers(path, "me"), "a") == ["a"]
    assert ask(KeptAnswers(path, "you"), "a") == ["a"]
    assert ask(KeptAnswers(path, "me"), "a") == ask(KeptAnswers(path, "you"), "a") == []
    assert len(path.read_text().splitlines()) == 2


def test_a_file_that_cannot_be_written_is_found_before_anything_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "kept", Path("/proc/none/kept")):
        with pytest.raises(ConfigError, match=r"^resume='.*' is not allowed \(.+\); allowed: a file to be written$"):
            KeptAnswers(path, "me")


def test_a_full_disk_costs_no_answer(tmp_path: Path, monkeypatch, caplog) -> None:
    kept = KeptAnswers(tmp_path / "kept", "me")

    def full(path: Path, line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_answers, "_append", full)
    assert ask(kept, "a", "b", "c") == ["a", "b", "c"]
    assert len(caplog.records) == 1 and "answers are no longer kept: No space left on device" in caplog.text


@pytest.fixture
def engine() -> Engine:
    """A small model with random weights and a real tokenizer."""
    made = Engine.from_pretrained("random:tiny", method="full_kv")
    return Engine(made.model, load_tokenizer("smollm2"), "full_kv", made.config, {2})


def changed_weight(model: Decoder, name: str) -> Decoder:
    layers = [dataclasses.replace(layer) for layer in model.layers]
    copy = dataclasses.replace(model, layers=layers)
    holder = copy if hasattr(copy, name) else layers[-1]
    weight = getattr(holder, name).clone()
    weight.view(-1)[-1] += 1
    setattr(holder, name, weight)
    return copy


@pytest.mark.parametrize("name", ["embedding_VE", "final_norm_E", "qkv_QE", "mlp_norm_E", "down_EF"])
def test_each_weight_decides(engine: Engine, name: str) -> None:
    model = engine.model
    again = Engine.from_pretrained("random:tiny", method="full_kv").model
    assert weights_digest(model) == weights_digest(again)
    assert weights_digest(changed_weight(model, name)) != weights_digest(model)


def other_template(engine: Engine) -> Engine:
    tokenizer = load_tokenizer("smollm2")
    tokenizer.chat_template = "other"
    return Engine(engine.model, tokenizer, "full_kv", engine.config, engine.stop_ids)


def other_shape(engine: Engine) -> Engine:
    shorter = dataclasses.replace(engine.model.config, max_context=100)
    model = dataclasses.replace(engine.model, config=shorter)
    return Engine(model, engine.tokenizer, "full_kv", engine.config, engine.stop_ids)


@pytest.mark.parametrize(
    "other",
    [
        other_template,
        other_shape,
        lambda e: Engine(changed_weight(e.model, "down_EF"), e.tokenizer, "full_kv", e.config, e.stop_ids),
        lambda e: Engine(e.model.to("cpu", torch.bfloat16), e.tokenizer, "full_kv", e.config, e.stop_ids),
        lambda e: Engine(e.model, e.tokenizer, "full_kv", e.config, {2, 3}),
        lambda e: e.with_method("streaming_llm"),
        lambda e: e.with_method("baselines.full_kv:FullKV"),
    ],
)
def test_what_decides_answers_is_in_the_identity(engine: Engine, other: Callable[[Engine], Engine]) -> None:
    assert answers_identity(engine) == answers_identity(engine)
    assert answers_identity(other(engine)) != answers_identity(engine)


def test_options_code_packages_and_given_weights_are_in_the_identity(engine: Engine, monkeypatch) -> None:
    one, two = (engine.with_method("dualdecoder", budget=budget) for budget in (64, 128))
    assert answers_identity(one) != answers_identity(two)
    known = answers_identity(engine, "sha256:1")
    assert known != answers_identity(engine, "sha256:2") and json.loads(known)["weights"] == "sha256:1"
    monkeypatch.setattr(identity, "metadata", SimpleNamespace(version=lambda name: "9", PackageNotFoundError=KeyError))
    newer = answers_identity(engine, "sha256:1")
    monkeypatch.setattr(identity, "code_hash", lambda: "other")
    assert len({known, newer, answers_identity(engine, "sha256:1")}) == 3


def test_the_source_of_a_method_from_elsewhere_is_in_the_identity(engine: Engine, tmp_path: Path, monkeypatch) -> None:
    module = tmp_path / "own_method_of_this_test.py"
    module.write_text("from baselines.full_kv import FullKV\n\nclass Own(FullKV):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = engine.with_method("own_method_of_this_test:Own")
    before = answers_identity(mine, "w")
    module.write_text(module.read_text() + "\n# changed\n")
    assert answers_identity(mine, "w") != before
