"""RULER's score for tasks whose gold strings must all be found."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(prediction: str, answers: Sequence[str]) -> float:
    """Return the share of `answers` that occur in `prediction`, from 0 to 100.

    An answer occurs where it is a substring, whatever the case; control characters in the prediction count as
    newlines.  The mean over samples is `string_match_all` of NVIDIA/RULER `scripts/eval/synthetic/constants.py`.

    Raises:
        ValueError: `answers` is empty, holds an empty string, or is itself a string.
    """
    if isinstance(answers, str) or not answers or not all(answers):
        raise ValueError(f"answers must be a sequence of one or more non-empty strings, got {answers!r}")
    text = _CONTROL.sub("\n", prediction.strip()).lower()
    return 100.0 * sum(answer.lower() in text for answer in answers) / len(answers)
