"""A training example: token ids, and what each of them teaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What is learnt from predicting a token: nothing, the language, or the answer to a question.
NOTHING, PROSE, ANSWER = 0, 1, 2
_MARK = "\x00"


@dataclass(frozen=True)
class Example:
    """``roles[i]`` says what predicting ``token_ids[i]`` teaches."""

    token_ids: list[int]
    roles: list[int]


@dataclass(frozen=True)
class Question:
    """A question about a context and its answer; both are text."""

    text: str
    answer: str


@dataclass(frozen=True)
class Chat:
    """Builds dialogues in a tokenizer's chat template, piece by piece, so that a long context is encoded only once."""

    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def example(
        self, before: str, context: list[int], questions: list[Question], prose: list[bool] | bool = False
    ) -> Example:
        """One user turn with the context and the first question, its answer, then the other questions and answers.

        prose: which of the context's tokens are language to learn, or all or none of them.
        """
        opening, middle, closing = self._template()
        shown = [prose] * len(context) if isinstance(prose, bool) else prose
        token_ids = self.ids(opening + before) + context
        roles = [NOTHING] * (len(token_ids) - len(context)) + [PROSE if flag else NOTHING for flag in shown]
        for number, question in enumerate(questions):
            asked = self.ids((closing if number else "") + question.text + middle)
            answer = self.ids(question.answer) + self.stop
            token_ids += asked + answer
            roles += [NOTHING] * len(asked) + [ANSWER] * len(answer)
        return Example(token_ids, roles)

    @property
    def stop(self) -> list[int]:
        """What ends an answer."""
        return [self.tokenizer.eos_token_id]

    def overhead(self, before: str, questions: list[Question]) -> int:
        """Tokens of the example around its context."""
        return len(self.example(before, [], questions).token_ids)

    def _template(self) -> tuple[str, str, str]:
        """The template up to the first user text, from there to an answer, and from there to the next user text."""
        turns = [(role, _MARK) for role in ("user", "assistant", "user", "assistant")]
        text = self.tokenizer.apply_chat_template(
            [{"role": role, "content": mark} for role, mark in turns], tokenize=False
        )
        opening, middle, closing, *_ = text.split(_MARK)
        # The stop token itself belongs to the answer.
        return opening, middle, closing.removeprefix(self.tokenizer.eos_token)
