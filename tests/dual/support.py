"""A telling small model; recording and forcing predictions, to show that they never change the result."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualdecoder.dual import DualDecoder
from dualdecoder.engine import Engine, Run
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.model import Decoder


@dataclass
class Trace:
    """Row 0 of a run: logits and tokens of every step, and the true selection of every step and layer.

    ``selections`` starts with the pre-decode, so step ``i`` (from 1) has ``selections[i]``.
    """

    logits: list[Tensor] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    selections: list[list[Tensor]] = field(default_factory=list)


def trace(run: Run) -> Trace:
    """Take all steps of a run and record them."""
    result, method = Trace(), run.method
    begin_attention = method.begin_attention

    def recording(micro_batch: int, layer: int, *tensors: Tensor) -> Callable[[], Tensor]:
        attend = begin_attention(micro_batch, layer, *tensors)

        def attend_and_record() -> Tensor:
            output = attend()
            if micro_batch == len(method.micro_batches) - 1:
                if layer == 0:
                    result.selections.append([])
                result.selections[-1].append(method.selected[layer].clone())
            return output

        return attend_and_record

    method.begin_attention = recording
    for step in run.steps:
        result.logits.append(step.logits_BV)
        result.tokens.append(step.token_B)
    return result


class ForcedPredictor:
    """Predicts a share ``quality`` of the next step's true selection and wrong chunks for the rest.

    What it replaces by wrong chunks, and in which order it lists them, is random.
    """

    def __init__(self, truth: Trace, method: DualDecoder, quality: float, seed: int = 0) -> None:
        self.truth, self.method, self.quality = truth, method, quality
        self.random = random.Random(seed)
        self.calls = [0] * method.model.layers

    def __call__(self, layer: int, chosen_BKS: Tensor, own_BKS: Tensor) -> tuple[Tensor, Tensor]:
        return chosen_BKS, self.predict(layer)

    def predict(self, layer: int) -> Tensor:
        """The forced prediction of the next step's selection."""
        self.calls[layer] += 1
        if self.calls[layer] == len(self.truth.selections):
            return torch.full_like(self.method.selected[layer], NO_CHUNK)
        following = self.truth.selections[self.calls[layer]][layer]
        heads = [
            [self._mix(k, int(n)) for k in head]
            for head, n in zip(following.tolist(), self.method.chunks_B, strict=True)
        ]
        return torch.tensor(heads)

    def _mix(self, selected: list[int], chunks: int) -> list[int]:
        right = [chunk for chunk in selected if chunk != NO_CHUNK]
        wrong = [chunk for chunk in range(chunks) if chunk not in right]
        kept = self.random.sample(right, round(self.quality * len(right)))
        mixed = kept + self.random.sample(wrong, min(len(wrong), len(selected) - len(kept)))
        self.random.shuffle(mixed)
        return (mixed + [NO_CHUNK] * len(selected))[: len(selected)]


def assert_bit_equal(got: Trace, expected: Trace) -> None:
    assert got.tokens == expected.tokens
    assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))


def start(engine: Engine, prompts: list[list[int]], new_tokens: int, **options: object) -> Run:
    """A DualDecoder run on the engine's model."""
    return engine.with_method("dualdecoder", **options).start(prompts, new_tokens)


def sharpened(model: Decoder) -> Decoder:
    """Larger random weights, so that attention is far from uniform and a lost token changes the logits."""
    for layer in model.layers:
        layer.qkv_QE *= 12
        layer.output_EA *= 12
    return model


def with_bad_token(engine: Engine, token: int, value: float = torch.nan) -> Engine:
    """The engine with a model whose numbers are not finite as soon as it reads ``token``."""
    model = engine.model
    embedding_VE = model.embedding_VE.clone()
    embedding_VE[token] = value
    return Engine(dataclasses.replace(model, embedding_VE=embedding_VE), None, engine.method_name, engine.config)


def new_token(tokens: list[int], least: int, elsewhere: list[int]) -> int:
    """Place of a token from ``least`` on that occurs neither before nor ``elsewhere``."""
    return next(i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i] + elsewhere)
