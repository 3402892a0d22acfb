"""A draft model as the source of the speculated row's token: what it would say next, greedily, after the true tokens.

Suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualdecoder.errors import ContextError, require
from dualdecoder.graphs import StepRunner
from dualdecoder.method import method_class, method_config
from dualdecoder.model import Decoder
from dualdecoder.prefill import prefill_into

# The draft keeps the KV of its whole text on the device.
DRAFT_METHOD = "full_kv"


class DraftSpeculator:
    """Follows the true text with a model of its own, one token a step, and guesses the token after it.

    Takes memory for full KV of ``context`` tokens a sequence, and prefills the prompts. Raises ``ConfigError`` for a
    draft whose vocabulary has another size, ``ContextError`` for a context that it cannot hold. Whether the token ids
    mean the same to both models cannot be seen from their sizes.
    """

    def __init__(self, draft: Decoder, vocabulary: int, prompts: Sequence[Sequence[int]], context: int) -> None:
        _check(draft, vocabulary, context)
        sizes = {"batch": len(prompts), "context": context, "dtype": draft.dtype, "device": draft.device}
        self.method = method_class(DRAFT_METHOD)(draft.config, method_config(DRAFT_METHOD, {}), **sizes)
        for sequence, prompt in enumerate(prompts):
            prefill_into(draft, self.method, sequence, prompt)
        self.length_B = torch.tensor([len(prompt) for prompt in prompts], device=draft.device)
        self.step = StepRunner(draft, self.method)

    def first(self, token_B: Tensor, true_B: Tensor, active_B: Tensor) -> Tensor:
        """T' of the first step, the draft's own although the true one is known: as in all later steps."""
        return self._guess(token_B, active_B)

    def following(self, token_B: Tensor, from_row_1_B: Tensor, active_B: Tensor) -> Tensor:
        """T' of the next step, whose true token is ``token_B``."""
        return self._guess(token_B, active_B)

    def _guess(self, token_B: Tensor, active_B: Tensor) -> Tensor:
        logits_B1V = self.step(token_B[:, None], self.length_B, active_B)
        self.length_B = self.length_B + active_B
        return logits_B1V[:, 0].argmax(dim=-1)


def _check(draft: Decoder, vocabulary: int, context: int) -> None:
    name, size, most = draft.config.name, draft.config.vocabulary, draft.config.max_context
    require(size == vocabulary, "draft", f"{name}, vocabulary {size}", f"a vocabulary of {vocabulary}")
    if context > most:
        raise ContextError(f"draft: {context} tokens exceed the context of {name}; allowed: at most {most}")
