"""Prompts as a user brings them: text, lists of token ids, arrays; and messages in a model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualdecoder.checks import is_integer
from dualdecoder.errors import ConfigError, one_line, require

Prompt = str | Sequence[int]
"""Text, or token ids. Integer arrays of numpy and torch are taken for sequences too."""
_ALLOWED = "text, or a list of token ids (integers)"


def prompt_list(prompts: Any) -> list[Prompt]:
    """The prompts of a batch. Raises ``ConfigError`` for one prompt in the place of a list of them."""
    require(not isinstance(prompts, str), "prompts", prompts, "a list of prompts, not one string")
    require(_is_sequence(prompts), "prompts", prompts, "a list of prompts, each text or a list of token ids")
    return list(prompts)


def encoded(prompt: Any, tokenizer: Any, field: str = "prompt") -> list[int]:
    """Token ids of a text as the tokenizer gives them; ids come back as a list of integers.

    Raises ``ConfigError`` naming ``field`` for anything else, for text without a tokenizer or that is no Unicode.
    """
    if not isinstance(prompt, str):
        return _token_ids(prompt, field)
    if tokenizer is None:
        raise ConfigError(f"{field}: this model has no tokenizer; pass token ids instead of text")
    return list(tokenizer(_unicode(prompt, field)).input_ids)


def chat_text(tokenizer: Any, messages: list[dict[str, str]], **how: Any) -> str:
    """The messages in the model's chat template, as text; ``how``: keywords of ``apply_chat_template``.

    Raises ``ConfigError`` if there is no template, or if it refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError("chat: the tokenizer of this model has no chat template; pass plain text instead")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **how)
    except Exception as error:  # A template is a program of the checkpoint's and may raise anything.
        what = f"chat: the model's chat template refuses the message: {one_line(error)}"
        raise ConfigError(f"{what}; pass plain text instead") from error


def _is_sequence(value: object) -> bool:
    is_text = isinstance(value, str | bytes | bytearray | memoryview)
    # ``tolist``: numpy's arrays and torch's tensors, which are no sequences to Python.
    return not is_text and (isinstance(value, Sequence) or hasattr(value, "tolist"))


def _token_ids(prompt: Any, field: str) -> list[int]:
    require(_is_sequence(prompt), field, prompt, _ALLOWED)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    require(isinstance(ids, list), field, prompt, _ALLOWED)
    # All of one kind is the usual case, and quick to see for a long prompt.
    if set(map(type, ids)) <= {int}:
        return ids
    wrong = [token for token in ids if not is_integer(token)]
    require(not wrong, f"{field}: token id", wrong[0] if wrong else None, _ALLOWED)
    return [int(token) for token in ids]


def _unicode(text: str, field: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{field}: character {error.start} is half of one; allowed: whole Unicode text") from error
    return text
