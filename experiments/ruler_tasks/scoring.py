"""RULER's score of one answer."""

import re
from collections.abc import Sequence
from typing import Literal

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(prediction: str, answers: Sequence[str], match: Literal["all", "any"] = "all") -> float:
    """Return how well `prediction` holds the gold strings `answers`, from 0 to 100.

    `all`: the share of them that occur in it; `any`: 100 if one does.  A gold string occurs where it is a substring,
    whatever the case; control characters in the prediction count as newlines.  The means over samples are
    `string_match_all` and `string_match_part` of NVIDIA/RULER `scripts/eval/synthetic/constants.py`; lm-eval's port of
    the latter gives the share of gold strings instead, which is lower where a question has several.

    Raises:
        ValueError: `answers` is empty, holds an empty string, or is itself a string.
    """
    if isinstance(answers, str) or not answers or not all(answers):
        raise ValueError(f"answers must be a sequence of one or more non-empty strings, got {answers!r}")
    text = _CONTROL.sub("\n", prediction.strip()).lower()
    found = [answer.lower() in text for answer in answers]
    return 100.0 * (any(found) if match == "any" else sum(found) / len(found))
