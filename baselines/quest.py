"""Quest (arXiv 2406.10774): all KV on the device in pages, attention to the pages with the largest key bounds.

Prefill is exact. In decode the first layers stay dense; every other layer scores all full pages by the bound of their
keys and attends to the best of them and, always, to the last page, which holds the current token. With no more pages
than that, it attends to all.
The original selects for each query head. With grouped heads that would read a page up to G times, so this one keeps one
set per KV head, by the sum of the bounds of the group's heads: pages in the order of their bound on the group's mean
logit. That keeps nearly the attention mass that sets of each query head keep. With SmolLM2-135M and budgets of 128, 256
and 512, share of dense attention's mass in the set and the last page, mean over selecting layers, heads and positions:

    merge of a group        4 texts of 2,048 tokens    2 texts of 6,144 tokens
    none, a set per head    0.742, 0.867, 0.945        0.668, 0.792, 0.889
    sum of the bounds       0.740, 0.863, 0.941        0.664, 0.786, 0.886
    largest softmax         0.738, 0.862, 0.940        0.664, 0.780, 0.884
    mean softmax            0.740, 0.864, 0.942        0.668, 0.784, 0.886
    largest bound           0.710, 0.844, 0.931        0.628, 0.763, 0.866

A softmax over the pages would need a second pass over all scores, for 0.004 more at most.
Suffixes: as in ``baselines/summaries.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.blocks import BlockMethod
from baselines.summaries import BLOCK, BlockConfig, Listed
from dualdecoder.errors import require
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.method import Capabilities


@dataclass(frozen=True)
class QuestConfig(BlockConfig):
    """Settings of Quest; ``budget`` is that of the layers which select.

    dense_layers: first layers that attend to everything; 2 in the original.
    """

    dense_layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dense_layers >= 0, "dense_layers", self.dense_layers, "0 or more layers")


class Quest(BlockMethod):
    """Pages of all tokens on the device; ``slots`` of them, and the last, are attended to."""

    config_class = QuestConfig
    capabilities = Capabilities(
        exact=False,
        recalls=True,
        offloads=False,
        limits="one set of pages a KV head; the original has one a query head",
    )
    config: QuestConfig

    def allocate(self) -> None:
        super().allocate()
        model = self.model
        shape = (self.batch, model.kv_heads, self.chunks, 2, BLOCK, model.head_dim)
        self.pages = [self.ledger.on_device("kv", shape, self.dtype) for _ in range(model.layers)]
        # What the dense layers list: every page, as far as it is full.
        entries = self.chunks if self.config.dense_layers else 0
        self.slot_BKN, self.full_BKN = self.table(entries, torch.int32), self.table(entries)
        self.slot_BKN.copy_(torch.arange(entries, device=self.ledger.device))

    def listed_blocks(self) -> set[int]:
        return {self.slots, self.chunks} if self.config.dense_layers else {self.slots}

    def keep_prompt(self, sequence: int, layer: int, q_THD: Tensor, records_KNXCD: Tensor) -> None:
        self.pages[layer][sequence, :, : records_KNXCD.shape[1]] = records_KNXCD

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        super().begin_step(rows, commit_B)
        beyond_BKN = self.slot_BKN >= self.chunks_B[:, None, None]
        self.full_BKN.copy_(self.slot_BKN.masked_fill(beyond_BKN, NO_CHUNK))

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        state, pages = self.layers[layer], self.pages[layer]
        listed = self._list_all(layer) if layer < self.config.dense_layers else self._select(layer, q_BRHD)
        o_BRHD = self.ops.attend(q_BRHD, k_BRKD, v_BRKD, listed, state, self.lengths)
        self.ops.append(k_BRKD[:, 0], v_BRKD[:, 0], state, pages, self.lengths, self.commit_B)
        return o_BRHD

    def _list_all(self, layer: int) -> Listed:
        if self.rewrite:
            # It counts steps by layers, so it hears of this one too; there is nothing to replace.
            self.rewrite(layer, self.full_BKN, self.full_BKN)
        return Listed(self.pages[layer], self.slot_BKN, self.full_BKN)

    def _select(self, layer: int, q_BRHD: Tensor) -> Listed:
        chosen_BKS, _ = self.ops.select(q_BRHD, self.layers[layer], self.chunks_B, self.slots)
        if self.rewrite:
            chosen_BKS, _ = self.rewrite(layer, chosen_BKS, chosen_BKS)
        slot_BKS = self.ops.slots(chosen_BKS)
        if self.observe:
            # Every page lies in the slot of its number.
            self.observe(layer, chosen_BKS, chosen_BKS.where(slot_BKS == chosen_BKS, NO_CHUNK))
        return Listed(self.pages[layer], slot_BKS, chosen_BKS)

    def scored_layers(self) -> int:
        return max(0, self.model.layers - self.config.dense_layers)
