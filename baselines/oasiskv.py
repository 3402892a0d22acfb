"""OasisKV (arXiv 2608.08097): a resident set that follows the look-ahead row under a cap on transfers.

All KV lies in host memory in blocks of 16 tokens; on the device are the key bounds of all blocks, a resident set of K
blocks per sequence, layer and KV head, and the tail. Row 0 and the look-ahead row 1 attend to the same resident set,
the tail and, causally, themselves. Then row 1's query scores all blocks; its best K are the prediction for the same
layer of the next step. ``baselines/admission.py`` says which of them are copied; there is no corrective copy, so the
result depends on the prediction. The first resident set is the last prompt token's own selection.
The paper drafts row 1's token with an EAGLE-3 head. There are none here: row 1's token is self-speculated as in
DualDecoder (what the row 1 before it produced), or comes from a small draft model of the same vocabulary. The paper
does not say how a group's heads are merged: by the sum of their bounds, here, as in ``baselines/quest.py``.
On a GPU scores and admission run on one side stream and copies on another, beside the layers that follow.
Suffixes: as in ``baselines/summaries.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.admission import FIELDS, Admission, Prediction, ReferenceAdmission, Resident
from baselines.blocks import BlockMethod
from baselines.summaries import BLOCK, BlockConfig, Listed, bound_scores
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import top_chunks
from dualdecoder.method import Capabilities
from dualdecoder.transfer import SideStream


@dataclass(frozen=True)
class OasisKVConfig(BlockConfig):
    """Settings of OasisKV. The paper's main runs have ``budget=2064`` (128 resident blocks and the last one).

    fetch_ratio: blocks admitted at most per KV head and step, as a share of the resident set; at least one block is.
    draft: model that gives row 1's token, as ``load_model`` names it; empty for self-speculation. Its weights and its
        full KV are on the device too, and not part of the method's memory plan.
    host_sequences: sequences that the host keeps KV for; 0 for all. Fewer share it, for measuring transfers only.
    """

    fetch_ratio: float = 0.05
    draft: str = ""
    host_sequences: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.fetch_ratio <= 1, "fetch_ratio", self.fetch_ratio, "a share above 0, at most 1.0")
        require(self.host_sequences >= 0, "host_sequences", self.host_sequences, "0 (all) or a number of sequences")

    @property
    def cap(self) -> int:
        """Blocks admitted at most per KV head and step (C)."""
        return max(1, round(self.fetch_ratio * self.blocks))


class OasisKV(BlockMethod):
    """Full KV on the host; bounds, resident blocks and tail on the device."""

    config_class = OasisKVConfig
    capabilities = Capabilities(
        exact=False, recalls=True, offloads=True,
        limits="attends to what was resident in time; a block that is needed at once and was not foreseen is missed",
    )  # fmt: skip
    rows = 2
    selects_aside = True
    config: OasisKVConfig

    def allocate(self) -> None:
        super().allocate()
        self.draft = self.config.draft
        self.speculation = "draft" if self.draft else "self"
        model, ledger = self.model, self.ledger
        self.host = HostStore(model, self.config.host_sequences or self.batch, self.chunks, BLOCK, self.dtype, ledger)
        self.resident = [self._allocate_resident() for _ in range(model.layers)]
        self.slot_BKS = self.table(self.slots, torch.int32)
        self.slot_BKS.copy_(torch.arange(self.slots, device=ledger.device))
        self.counts = ledger.on_device("tables", (model.layers, len(FIELDS)), torch.int64)
        self.admission = self._make_admission()
        self.prediction = SideStream(ledger.device, urgent=False)
        self.prefetch = SideStream(ledger.device, urgent=False)

    def _allocate_resident(self) -> Resident:
        buffer = ChunkBuffer.allocate(self.model, self.batch, self.slots, BLOCK, self.dtype, self.ledger)
        return Resident(buffer, self.table(self.slots))

    @property
    def cap(self) -> int:
        """Blocks admitted at most per KV head and step."""
        return min(self.config.cap, self.slots)

    def _make_admission(self) -> Admission:
        return self.triton_admission() if self.device_type == "cuda" else ReferenceAdmission(self.chunks, self.cap)

    def triton_admission(self) -> Admission:
        """The GPU's admission, imported only here."""
        from baselines.kernels.admit import TritonAdmission

        heads = self.batch * self.model.kv_heads
        return TritonAdmission(self.ledger, layers=self.model.layers, heads=heads, slots=self.slots, cap=self.cap)

    def keep_prompt(self, sequence: int, layer: int, q_THD: Tensor, records_KNXCD: Tensor) -> None:
        """All blocks to the host; those that the last prompt token would choose are the first resident set."""
        if not records_KNXCD.shape[1]:
            return
        records_KNXCD = records_KNXCD.contiguous()
        with self.prefetch.work():
            self.host.write_prompt(layer, sequence, records_KNXCD)
        self.prefetch.keep_alive(records_KNXCD)
        one = slice(sequence, sequence + 1)
        scores_1RKN = bound_scores(q_THD[None, -1:], self.layers[layer].bounds_BKNYD[one], self.chunks_B[one])
        chosen_KS = top_chunks(scores_1RKN[0, 0], self.slots)
        resident = self.resident[layer]
        resident.buffer.held_BKS[sequence] = chosen_KS
        resident.used_BKS[sequence] = len(q_THD) - 1
        head_K1 = torch.arange(len(chosen_KS), device=chosen_KS.device)[:, None]
        resident.buffer.records_BKSXCD[sequence] = records_KNXCD[head_K1, chosen_KS.clamp(min=0)]

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        super().begin_step(rows, commit_B)
        self.admission.begin_step()

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        state, buffer = self.layers[layer], self.resident[layer].buffer
        listed = Listed(buffer.records_BKSXCD, self.slot_BKS, buffer.held_BKS)
        o_BRHD = self.ops.attend(q_BRHD, k_BRKD, v_BRKD, listed, state, self.lengths)
        # Before the scores: a block that this token fills leaves the tail, and may be predicted at once.
        self.ops.append(k_BRKD[:, 0], v_BRKD[:, 0], state, self.host.records[layer], self.lengths, self.commit_B)
        if q_BRHD.shape[1] == self.rows:
            self._look_ahead(layer, q_BRHD)
        return o_BRHD

    def _look_ahead(self, layer: int, q_BRHD: Tensor) -> None:
        """Predict this layer's blocks of the next step and fetch the admitted ones, beside the layers to come."""
        resident = self.resident[layer]
        with self.prediction.work():
            true_BKS = self._true_set(layer, q_BRHD) if self.observe and not self.rewrite else None
            number_BKS, scores_BKN = self.ops.select(q_BRHD[:, 1:], self.layers[layer], self.following_B, self.slots)
            if self.rewrite:
                true_BKS, number_BKS = self.rewrite(layer, number_BKS, number_BKS)
            if self.observe:
                # What row 0 has just attended to is resident until the admission.
                self.observe(layer, true_BKS, resident.buffer.held_BKS)
            prediction = Prediction(number_BKS, scores_BKN, self.length_B, self.commit_B)
            fetch = self.admission.admit(layer, prediction, resident, self.counts[layer])
            if self.transfers:
                with self.prefetch.work():
                    self.admission.fetch(self.host, layer, fetch, resident.buffer)
        self.prediction.keep_alive(q_BRHD)

    def _true_set(self, layer: int, q_BRHD: Tensor) -> Tensor:
        """The blocks that row 0's own query asks for; a copy, for the operations' result does not stay."""
        return self.ops.select(q_BRHD[:, :1], self.layers[layer], self.chunks_B, self.slots)[0].clone()

    def remark(self) -> str:
        return f"at most {self.cap} of {self.slots} resident blocks are replaced a step; {self.capabilities.limits}"

    def end_step(self) -> None:
        self.prediction.join()
        self.prefetch.join()
        super().end_step()

    def statistics(self) -> dict[str, float]:
        """Block counts, link bytes, and ``agreement``: the share of the predictions that was resident in the end."""
        counts = dict(zip(FIELDS, self.counts.sum(dim=0).tolist(), strict=True))
        there = counts["kept"] + counts["admitted"]
        return {
            **counts,
            "urgent_bytes": 0,
            "prefetched_bytes": counts["admitted"] * self.host.record_bytes,
            "agreement": there / counts["predicted"] if counts["predicted"] else math.nan,
        }
