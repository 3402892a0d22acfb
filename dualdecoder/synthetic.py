"""A DualDecoder filled with seeded values, for measuring transfers and kernels without a prefill (design section 6).

Suffixes: B sequences, K KV heads, O outlier chunks.
"""

from __future__ import annotations

import torch

from dualdecoder.dual import DualDecoder
from dualdecoder.errors import require
from dualdecoder.selection_replay import ReplayConfig, SelectionReplay


def fill_synthetic(method: DualDecoder, tokens: int, seed: int = 0) -> None:
    """Make every sequence ``tokens`` long, with random records, landmarks, outliers and window."""
    config = method.config
    require(config.local < tokens < method.context, "context", tokens, f"{config.local + 1} to {method.context - 1}")
    device = method.ledger.device
    generator = torch.Generator(device).manual_seed(seed)
    chunks = (tokens - config.local) // config.chunk
    for layer, state in enumerate(method.layers):
        for records in method.host.records[layer]:
            values = torch.empty(records.shape, dtype=records.dtype, device=device)
            records.copy_(values.normal_(generator=generator), non_blocking=True)
        for tensor in (state.landmarks_BKND, state.outlier_records_BKOXCD, state.window_BKXWD):
            tensor.normal_(generator=generator)
        outliers = state.outliers_BKO.shape[-1]
        state.outliers_BKO.copy_(torch.arange(outliers, device=device) * (chunks // outliers))
    method.length_B.fill_(tokens)
    method.chunks_B.fill_(chunks)


def replay_selection(method: DualDecoder, config: ReplayConfig) -> SelectionReplay:
    """Let a seeded process decide what is selected and predicted; scoring and top-S still run in full."""
    shape = (method.batch, method.model.kv_heads, int(method.chunks_B[0]))
    replay = SelectionReplay(config, shape, method.slots, method.ledger)
    method.rewrite = lambda layer, _chosen, _predicted: replay.sets(layer, method.model.layers)
    return replay
