"""One decode step: the body that becomes a CUDA graph. No host synchronisation in here.

Suffixes: B sequences, R rows, E model width, V vocabulary.
"""

from __future__ import annotations

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
    rotation = model.rotation(positions_BR)
    x_BRE = model.embed(tokens_BR)
    method.begin_step(tokens_BR.shape[1], commit_B)
    for layer in range(model.config.layers):
        p = model.project(layer, x_BRE, rotation)
        if method.foresees and layer + 1 < model.config.layers:
            method.foresee(layer + 1, model.query(layer + 1, x_BRE, rotation, normed_by=layer))
        o_BRHD = method.attend(layer, p.q_BRHD, p.k_BRKD, p.v_BRKD)
        x_BRE = model.finish_layer(layer, x_BRE, o_BRHD)
    method.end_step()
    return model.logits(x_BRE)
