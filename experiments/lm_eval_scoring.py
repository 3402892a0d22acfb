"""Log-likelihoods of continuations, for lm-eval: by one prefill where a method is exact, else by decoding.

Suffixes: B sequences, T text tokens, E model width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualdecoder.engine import Engine
from dualdecoder.finite import finite_rows, require_finite
from dualdecoder.method import method_class
from dualdecoder.prefill import PrefillSnapshot, prefill
from experiments.harness.teacher import forced_logits
from experiments.lm_eval_requests import Pair

# Bounds the logits that one exact scoring holds: tokens of a piece.
PIECE_TOKENS = 512

Score = tuple[float, bool]
"""Log-likelihood of a continuation in nats, and whether it is what greedy decoding gives."""


def scores(engine: Engine, pairs: Sequence[Pair]) -> list[Score]:
    """Scores of pairs that ``fitted`` gave, as the engine's method sees them."""
    if method_class(engine.method_name).capabilities.exact:
        return [_exact(engine, *pair) for pair in pairs]
    if len(pairs) == 1 or _fit_together(pairs, engine.model.config.max_context):
        return _decoded(engine, pairs)
    return [_decoded(engine, [pair])[0] for pair in pairs]


def _fit_together(pairs: Sequence[Pair], longest: int) -> bool:
    """Whether every context has room for the longest continuation: all sequences of a batch take as many steps."""
    contexts, continuations = zip(*pairs, strict=True)
    return max(map(len, contexts)) + max(map(len, continuations)) <= longest + 1


@torch.inference_mode()
def _exact(engine: Engine, context: list[int], continuation: list[int]) -> Score:
    model = engine.model
    hidden_TE = prefill(model, [*context, *continuation][:-1], lambda *_: None)[len(context) - 1 :]
    pieces = torch.tensor(continuation, device=model.device).split(PIECE_TOKENS)
    parts = []
    for piece_TE, token_T in zip(hidden_TE.split(PIECE_TOKENS), pieces, strict=True):
        logits_TV = model.logits(piece_TE[None])[0]
        require_finite([bool(finite_rows(logits_TV).all())], model.dtype)
        parts.append(_score(logits_TV, token_T))
    return sum(value for value, _ in parts), all(greedy for _, greedy in parts)


def _decoded(engine: Engine, pairs: Sequence[Pair]) -> list[Score]:
    snapshots: dict[tuple[int, ...], PrefillSnapshot] = {}
    for context, _ in pairs:
        if tuple(context) not in snapshots:
            snapshots[tuple(context)] = PrefillSnapshot.take(engine.model, context)
    prefills = [snapshots[tuple(context)] for context, _ in pairs]
    totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
    for place, logits_BV in enumerate(forced_logits(engine, prefills, [more for _, more in pairs])):
        for b, (_, continuation) in enumerate(pairs):
            if place < len(continuation):
                token = torch.tensor(continuation[place : place + 1], device=logits_BV.device)
                value, same = _score(logits_BV[b : b + 1], token)
                totals[b], greedy[b] = totals[b] + value, greedy[b] and same
    return list(zip(totals, greedy, strict=True))


def _score(logits_TV: Tensor, token_T: Tensor) -> Score:
    """Sum of the tokens' log-probabilities, and whether each is the most likely one."""
    chosen_T = logits_TV.log_softmax(dim=-1).gather(1, token_T[:, None])[:, 0]
    return float(chosen_T.double().sum()), bool((logits_TV.argmax(dim=-1) == token_T).all())
