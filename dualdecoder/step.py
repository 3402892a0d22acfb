"""One decode step: the body that becomes a CUDA graph. No host synchronisation in here.

Suffixes: B sequences, R rows, E model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dualdecoder.method import KVMethod
from dualdecoder.model import Decoder


@torch.inference_mode()
def decode_step(model: Decoder, method: KVMethod, tokens_BR: Tensor, lengths_B: Tensor, commit_B: Tensor) -> Tensor:
    """Run the rows at positions ``lengths_B + 0, 1`` and return fp32 logits ``[B, R, V]``.

    ``commit_B`` (bool): row 0 of these sequences is added to the context; all other rows leave no trace.
    """
    positions_BR = lengths_B[:, None] + torch.arange(tokens_BR.shape[1], device=tokens_BR.device)
    assert len(method.micro_batches) == 1 or not method.foresees, "a guess is for all sequences"
    method.begin_step(tokens_BR.shape[1], commit_B)
    turns = [
        _layers(model, method, number, tokens_BR[sequences], positions_BR[sequences])
        for number, sequences in enumerate(method.micro_batches)
    ]
    for _ in range(model.config.layers):
        for turn in turns:
            next(turn)
    hidden = [next(turn) for turn in turns]
    method.end_step()
    return model.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))


def _layers(
    model: Decoder, method: KVMethod, micro_batch: int, tokens_BR: Tensor, positions_BR: Tensor
) -> Iterator[Tensor]:
    """All layers of one micro-batch: gives way in each once its attention has begun; last come the hidden states."""
    rotation = model.rotation(positions_BR)
    x_BRE = model.embed(tokens_BR)
    for layer in range(model.config.layers):
        p = model.project(layer, x_BRE, rotation)
        if method.foresees and layer + 1 < model.config.layers:
            method.foresee(layer + 1, model.query(layer + 1, x_BRE, rotation, normed_by=layer))
        attention = method.begin_attention(micro_batch, layer, p.q_BRHD, p.k_BRKD, p.v_BRKD)
        # Nobody looks at it: only what comes last counts.
        yield x_BRE
        x_BRE = model.finish_layer(layer, x_BRE, attention())
    yield x_BRE
