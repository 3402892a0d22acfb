"""Which tokens end a sequence: the union of what the tokenizer and the checkpoint's files name.

Each source alone is incomplete in checkpoints that people use: chat models list their end of turn only in
``generation_config.json``, and a converted tokenizer may have lost its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dualdecoder.checks import is_integer
from dualdecoder.config_file import read_object
from dualdecoder.errors import CheckpointError, ConfigError, shortened

FILES = ("config.json", "generation_config.json")
_FIELD = "eos_token_id"


def checkpoint_stop_ids(folder: Path, tokenizer: Any, vocabulary: int) -> frozenset[int]:
    """Stop ids of a checkpoint folder and its tokenizer (None: the folder's alone), for a model of ``vocabulary`` ids.

    An id outside the vocabulary is left out: the model can never give it. Raises ``CheckpointError`` naming the file
    for an ``eos_token_id`` that is neither an integer, a list of integers, nor null.
    """
    named = [token for name in FILES for token in _read(folder / name)]
    return tokenizer_stop_ids(tokenizer, vocabulary) | {token for token in named if 0 <= token < vocabulary}


def tokenizer_stop_ids(tokenizer: Any, vocabulary: int) -> frozenset[int]:
    """The tokenizer's own end of sequence; empty without a tokenizer, or where the model has no such token."""
    eos = getattr(tokenizer, _FIELD, None)
    return frozenset() if eos is None or not 0 <= eos < vocabulary else frozenset({eos})


def checked_stop_ids(stop_ids: Iterable[int], vocabulary: int) -> frozenset[int]:
    """``stop_ids`` as a set. Raises ``ConfigError`` unless they are token ids of the model."""
    allowed = f"a list of token ids from 0 to {vocabulary - 1}"
    if not isinstance(stop_ids, Iterable) or isinstance(stop_ids, str):
        raise ConfigError(f"stop_ids={stop_ids!r} is not allowed; allowed: {allowed}")
    given = list(stop_ids)
    wrong = [token for token in given if not (is_integer(token) and 0 <= token < vocabulary)]
    if wrong:
        raise ConfigError(f"stop_ids holds {wrong[0]!r}, which is not allowed; allowed: {allowed}")
    return frozenset(given)


def _read(path: Path) -> list[int]:
    value = read_object(path).get(_FIELD) if path.is_file() else None
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(map(is_integer, ids)):
        where, allowed = f"{path.parent.name}/{path.name}", "an integer, a list of integers, or null"
        raise CheckpointError(f"{where}: {_FIELD}={shortened(repr(value))} is not allowed; allowed: {allowed}")
    return ids
