"""Committed RULER records whose answers run on behind the end of turn score as if they had been cut there."""

import json
from pathlib import Path

import pytest

from experiments.ruler_tasks import score, task_named

FOLDER = Path(__file__).resolve().parents[2] / "results" / "h200" / "ruler"
END_OF_TURN = "<|im_end|>"
# Commits whose records were made before generation ended at every end of turn.
BEFORE = {"982b8d84d672", "f864ae196920"}


def test_cutting_answers_at_the_end_of_turn_changes_no_score():
    longer = rows = 0
    for path in sorted(FOLDER.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for row in record["rows"] if record["environment"]["commit"] in BEFORE else []:
            match = task_named(row["task"]).match
            pairs = list(zip(row["answers"], row["expected"], strict=True))
            cut = [score(answer.partition(END_OF_TURN)[0], expected, match) for answer, expected in pairs]
            assert cut == pytest.approx(row["scores"]), (path.name, row["method"])
            longer += sum(END_OF_TURN in answer for answer, _ in pairs)
            rows += 1
    assert not rows or longer > 0
