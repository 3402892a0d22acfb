"""Turning a stream of tokens into printable text."""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"


class TextPieces:
    """Incremental detokenisation: a piece is given out once it ends on a whole character."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.start = self.shown = 0  # text before `start` is final; tokens up to `shown` have been given out

    def add(self, token_id: int) -> str:
        """Text that the token completes; empty inside a character, or without a tokenizer."""
        if self.tokenizer is None:
            return ""
        self.token_ids.append(token_id)
        whole = self._decode(len(self.token_ids))
        if whole.endswith(_INCOMPLETE):
            return ""
        return self._give_out(whole)

    def rest(self) -> str:
        """What was held back, also if it ends inside a character."""
        return self._give_out(self._decode(len(self.token_ids))) if self.tokenizer is not None else ""

    def _give_out(self, whole: str) -> str:
        new = whole[len(self._decode(self.shown)) :]
        self.start, self.shown = self.shown, len(self.token_ids)
        return new

    def _decode(self, end: int) -> str:
        # From `start` on only: the cost stays constant however long the text gets.
        return self.tokenizer.decode(self.token_ids[self.start : end])
