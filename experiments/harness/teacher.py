"""Teacher forcing: a method decodes over a known text, and its next-token distributions are what is looked at.

Suffixes: B sequences, R rows, T text tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dualdecoder.engine import Engine
from dualdecoder.method import KVMethod
from dualdecoder.prefill import PrefillSnapshot


class Teacher:
    """Gives row 0 the known token; a speculated row keeps the model's own, so that speculation is not flattered."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, texts))
        # The fill is never looked at: it stands where a shorter text has ended.
        self.text_BT = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])

    def __call__(self, logits_BRV: Tensor, position_B: Tensor) -> Tensor:
        """Tokens ``[B, R]`` after rows at ``position_B + 0, 1``."""
        self.text_BT = self.text_BT.to(logits_BRV.device)
        next_B = (position_B.to(logits_BRV.device) + 1).clamp(max=self.text_BT.shape[1] - 1)
        token_BR = logits_BRV.argmax(dim=-1)
        token_BR[:, 0] = self.text_BT.gather(1, next_B[:, None])[:, 0]
        return token_BR


def forced_logits(
    engine: Engine,
    snapshots: Sequence[PrefillSnapshot],
    continuations: Sequence[Sequence[int]],
    watch: Callable[[KVMethod], None] = lambda method: None,
) -> Iterator[Tensor]:
    """fp32 logits ``[B, V]`` for every token of the continuations, in order, as the method sees the text before it.

    The first come from the prefill, which is the same for every method. Shorter continuations give logits without
    meaning after their end. Each tensor is valid until the next one is asked for. ``watch`` is given the filled method
    before its first step.
    """
    yield torch.stack([snapshot.logits_V for snapshot in snapshots])
    texts = [[*snapshot.token_ids, *more] for snapshot, more in zip(snapshots, continuations, strict=True)]
    run = engine.resume(snapshots, max(map(len, continuations)), choose=Teacher(texts))
    watch(run.method)
    for step in run.steps:
        yield step.logits_BV
