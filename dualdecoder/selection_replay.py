"""A seeded stand-in for the selection of a model with random weights (design section 6).

Random weights have meaningless attention. Scoring and top-S run at full cost; then the chunk numbers are replaced by a
process with a given reuse (share of a step's set that was in the last step's) and prediction accuracy (share of a
step's set that was predicted). Each KV head walks a random order of its chunks: a step's set is a window of it that
moves on by ``(1 - reuse) * S`` places, and the wrong part of a prediction comes from the far side of the order.
Suffixes: L layers, Z = the true set and the predicted one, B sequences, K KV heads, N chunks, S selected chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.errors import require
from dualdecoder.ledger import Ledger
from dualdecoder.method import KVMethod

# A context holds at least as many sets, so that what is selected next is not what was selected last.
REPLAYED_SETS = 4


@dataclass(frozen=True)
class ReplayConfig:
    """``reuse`` and ``accuracy`` are shares from 0 to 1 (defaults: ShadowKV's reuse, the paper's accuracy)."""

    reuse: float = 0.60
    accuracy: float = 0.88
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("reuse", "accuracy"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share from 0 to 1")


class SelectionReplay:
    """True and predicted sets of every step, computed on the device from a step counter; capturable in a graph."""

    def __init__(self, config: ReplayConfig, shape: tuple[int, int, int], slots: int, ledger: Ledger) -> None:
        chunks = shape[-1]
        least = REPLAYED_SETS * slots
        require(chunks >= least, "context", chunks, f"at least {least} chunks for a synthetic selection")
        self.slots, self.chunks = slots, chunks
        self.moved = round((1 - config.reuse) * slots)
        self.right = round(config.accuracy * slots)
        # Sequences of the present layer that have been given their sets.
        self.served = 0
        self.step = ledger.on_device("replay", (1,), torch.int64)
        self.order_BKN = ledger.on_device("replay", shape, torch.int64)
        generator = torch.Generator(ledger.device).manual_seed(config.seed)
        for order_KN in self.order_BKN:
            order_KN.copy_(torch.rand(order_KN.shape, generator=generator, device=ledger.device).argsort(dim=-1))

    def sets(self, layer: int, layers: int, sequences: int | None = None) -> tuple[Tensor, Tensor]:
        """The step's true set and what it predicts of the next one, ``[B, K, S]`` int64, in the process's own order.

        Layers are asked for in order, from 0 to ``layers - 1``, once a step: for all sequences at a time, or in groups
        of ``sequences``, which follow each other.
        """
        if layer == 0 and self.served == 0:
            # All layers' sets at once: a launch a step instead of a launch a layer, which a real selection has not.
            place_LZS = self._places(layers)[:, :, None, None]
            shape = (layers, 2, *self.order_BKN.shape[:2], self.slots)
            self.sets_LZBKS = self.order_BKN.expand(layers, 2, -1, -1, -1).gather(-1, place_LZS.expand(shape))
            self.step += 1
        sets_ZBKS = self.sets_LZBKS[layer, :, self.served :][:, :sequences]
        self.served = (self.served + sets_ZBKS.shape[1]) % len(self.order_BKN)
        return sets_ZBKS[0], sets_ZBKS[1]

    def _places(self, layers: int) -> Tensor:
        """Places in the order for all layers of a step: of the true set, and of the prediction."""
        place_S = torch.arange(self.slots, device=self.step.device)
        # The wrong part of a prediction comes from half the order away, where the true set is not.
        wrong_S = (place_S >= self.right) * (self.chunks // 2)
        place_ZS = torch.stack((place_S, place_S + self.moved + wrong_S))
        # Layers start at places that share no period with usual chunk counts.
        start_L = self.step * self.moved + torch.arange(layers, device=self.step.device) * 7919
        return (start_L[:, None, None] + place_ZS) % self.chunks


def replay_selection(method: KVMethod, config: ReplayConfig) -> SelectionReplay:
    """Let a seeded process decide what is selected and predicted; the method's own selection still runs in full.

    For methods that select ``method.slots`` of ``method.chunks_B`` chunks and heed ``method.rewrite``.
    """
    shape = (method.batch, method.model.kv_heads, int(method.chunks_B[0]))
    replay = SelectionReplay(config, shape, method.slots, method.ledger)
    layers = method.model.layers
    # The method must not be named in here: holding itself, it would keep its memory after its last use.
    method.rewrite = lambda layer, chosen, _predicted: replay.sets(layer, layers, len(chosen))
    return replay
