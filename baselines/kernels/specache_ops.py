"""The operations of one SpeCache layer in Triton, with the meaning of ``specache.Ops``.

Launches of a layer: attention and commit on the compute stream; keys, top S (two for long contexts), marks and slots on
the choice stream, beside the rest of the layer, so there are two sets of scores, used in turn; the gather on the
prefetch stream, beside the choices of the layers to come, so every layer has a fetch list.
Suffixes: as in ``baselines/specache.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baselines.kernels.lowbit_attention import LowBitTokens, check_shapes, lowbit_attention, wanted_splits
from baselines.kernels.lowbit_commit import commit_lowbit
from baselines.kernels.lowbit_top import ChoiceWorkspace, choose_tokens
from baselines.specache import SCORE_BUFFERS, SpeCacheLayer, Step
from dualdecoder.config import ModelConfig
from dualdecoder.host_store import HostStore
from dualdecoder.kernels.fetch_list import FetchList
from dualdecoder.kernels.gather import gather_records
from dualdecoder.kernels.slots import SlotWorkspace, assign_slots
from dualdecoder.kernels.sparse_attention import SparseAttentionWorkspace
from dualdecoder.ledger import Ledger
from dualdecoder.ops import Counting

ROWS = 2
# Records of one token are small: many in flight of each program.
GATHER_ROWS = 16


class TritonOps:
    """Kernels and their workspaces for one method instance."""

    def __init__(
        self, model: ModelConfig, layers: list[SpeCacheLayer], *, batch: int, context: int, ledger: Ledger
    ) -> None:
        cache, top, kv_heads = layers[0].cache, layers[0].chosen_BKS.shape[2], model.kv_heads
        check_shapes(cache.bits, cache.group, model.head_dim, ROWS * model.group)
        # By layer: a mark for every token that has an exact pair.
        self.marked = [ledger.on_device("marks", (batch, kv_heads, cache.tokens), torch.int8) for _ in layers]
        splits = 1 + wanted_splits(batch * kv_heads, cache.key_codes_BKPWD.shape[2])
        self.attention_workspaces = [
            SparseAttentionWorkspace.allocate(ledger, batch, kv_heads, model.head_dim, context, splits)
            for _ in range(SCORE_BUFFERS)
        ]
        logits = (batch, kv_heads, context, model.group)
        self.logits = [ledger.on_device("workspace", logits, torch.float32) for _ in range(SCORE_BUFFERS)]
        self.choice_workspace = ChoiceWorkspace.allocate(ledger, batch, kv_heads, context, top)
        self.slot_workspace = SlotWorkspace.allocate(ledger, batch * kv_heads, context, top)
        output = (batch * ROWS * model.query_heads * model.head_dim,)
        self.output = ledger.on_device("workspace", output, cache.ring_BKXWD.dtype)
        # The next layer's choice is listed while this layer's list is still being read on the prefetch stream: the two
        # streams are not ordered, so no layers share a list.
        self.counters, self.fetches = FetchList.for_layers(ledger, len(layers), batch * kv_heads * top)

    def begin_step(self, step: Step) -> None:
        self.step = step
        self.counters.zero_()

    def attend(self, layer: int, state: SpeCacheLayer, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        cache = state.cache
        tokens = LowBitTokens(
            cache.key_codes_BKPWD, cache.key_levels_BKNLD, cache.value_codes_BKPDW, cache.value_levels_BKLCT,
            cache.ring_BKXWD, self.marked[layer], state.pairs.records_BKSXCD, state.slot_BKS, state.chosen_BKS,
            self.step.length_B,
        )  # fmt: skip
        turn = layer % SCORE_BUFFERS
        # A step of one row uses the front.
        o_BRHD = self.output[: q_BRHD.numel()].view(q_BRHD.shape)
        workspace, logits_BKTG = self.attention_workspaces[turn], self.logits[turn]
        return lowbit_attention(q_BRHD, k_BRKD, v_BRKD, tokens, workspace, logits_BKTG, o_BRHD)

    def commit(self, layer: int, state: SpeCacheLayer, host: HostStore, k_BKD: Tensor, v_BKD: Tensor) -> None:
        commit_lowbit(state.cache, host.records[layer], k_BKD, v_BKD, self.step.length_B, self.step.commit_B)

    def choose(self, layer: int, state: SpeCacheLayer, counts_F: Tensor) -> FetchList:
        step, turn, fetch = self.step, layer % SCORE_BUFFERS, self.fetches[layer]
        choose_tokens(
            self.logits[turn], self.attention_workspaces[turn], step.rows, step.candidates_B, step.exact_from_B,
            step.chooses_B, self.choice_workspace, state.chosen_BKS, self.marked[layer],
        )  # fmt: skip
        counting = Counting(counts_F, step.commit_B)
        assign_slots(state.chosen_BKS, state.pairs.held_BKS, state.slot_BKS, fetch, self.slot_workspace, counting)
        return fetch

    def fetch(self, layer: int, state: SpeCacheLayer, host: HostStore, fetch: FetchList) -> None:
        gather_records(host.records[layer], state.pairs.records_BKSXCD, fetch, rows=GATHER_ROWS)
