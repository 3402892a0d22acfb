"""SpeCache (arXiv 2503.16163): dense attention over a low-bit copy of every token, with 64 exact tokens a KV head.

The full 16-bit KV is in host memory. Row 1 of a step, the speculated next token, says which tokens will matter most in
the next step: their exact keys and values are copied ahead and stand in for the low-bit ones there. What was not
foreseen is used in low bits. The engine's pre-decode, a step of the first token alone, makes the first choice.
A chosen token that will be exact on the device anyway in the next step (in the unquantised tail of the keys) takes one
of the 64 places but is not copied; a pair that is still in the buffer from the step before is not copied again.
Suffixes: B sequences, R rows, T tokens of capacity, H query heads, K KV heads, D head size, W tokens of the ring,
P past tokens attended to, S exact tokens of a KV head, X = K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.lowbit import BITS, LowBitCache
from dualdecoder import window
from dualdecoder.attention import step_attention
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import MethodConfig
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import NO_CHUNK, or_spare, top_chunks
from dualdecoder.method import Capabilities, KVMethod
from dualdecoder.ops import Counting, ReferenceFetch
from dualdecoder.ops import ReferenceOps as BufferOps
from dualdecoder.telemetry import Telemetry
from dualdecoder.transfer import SideStream

# Most exact tokens a KV head that the GPU's selection takes.
MAX_TOP = 1024
# Layers whose scores are kept: a layer's choice is made while the next layer computes.
SCORE_BUFFERS = 2


@dataclass(frozen=True)
class SpeCacheConfig(MethodConfig):
    """Settings of SpeCache. It attends to every token, so it has no budget of tokens; compare at equal bytes.

    bits: of a number of the copy on the device: 2 or 1, or 16 for an unquantised one (on a CPU, for checking).
    group: consecutive tokens of a key group and, at most, channels of a value group; also the exact recent values.
    top: exact tokens a KV head, copied ahead.
    host_sequences: sequences that the host keeps KV for; 0 for all. Fewer share it, for measuring transfers only.
    """

    bits: int = 2
    group: int = 64
    top: int = 64
    host_sequences: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bits in BITS, "bits", self.bits, ", ".join(map(str, BITS)))
        require(self.group >= 1, "group", self.group, "a positive number of tokens")
        require(1 <= self.top <= MAX_TOP, "top", self.top, f"1 to {MAX_TOP} tokens")
        require(self.host_sequences >= 0, "host_sequences", self.host_sequences, "0 (all) or a number of sequences")


@dataclass(frozen=True)
class SpeCacheLayer:
    """One layer on the device: the low-bit cache, and the exact pairs that stand in for some of it.

    chosen_BKS (int64): positions, ascending, ``NO_CHUNK`` for none; slot_BKS (int32): where in ``pairs`` each lies.
    """

    cache: LowBitCache
    pairs: ChunkBuffer
    chosen_BKS: Tensor
    slot_BKS: Tensor


@dataclass(frozen=True)
class Step:
    """What a step knows before its first layer.

    length_B: tokens so far. commit_B (bool): row 0 becomes one more. chooses_B (bool): the last row chooses the next
    step's exact tokens, among ``candidates_B`` positions; those from ``exact_from_B`` on will have exact keys anyway.
    """

    rows: int
    length_B: Tensor
    commit_B: Tensor
    chooses_B: Tensor
    candidates_B: Tensor
    exact_from_B: Tensor

    @classmethod
    def begin(cls, rows: int, length_B: Tensor, commit_B: Tensor, group: int) -> Step:
        """Row 1 may choose row 0, but no row itself. A row 1 whose row 0 is not committed foresees nothing."""
        following_B = length_B + commit_B
        exact_from_B = following_B // group * group
        if rows == 1:
            return cls(rows, length_B, commit_B, torch.ones_like(commit_B), length_B, exact_from_B)
        return cls(rows, length_B, commit_B, commit_B, following_B, exact_from_B)


class Ops(Protocol):
    """Operations of one layer. ``attend``, ``commit``, ``choose`` and ``fetch`` are called in this order."""

    def begin_step(self, step: Step) -> None:
        """Called before a step's other operations."""

    def attend(self, layer: int, state: SpeCacheLayer, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        """Attention of all rows, ``[B, R, H, D]``; the last row's scores are kept for ``choose``."""

    def commit(self, layer: int, state: SpeCacheLayer, host: HostStore, k_BKD: Tensor, v_BKD: Tensor) -> None:
        """Row 0 to the low-bit cache and to the host."""

    def choose(self, layer: int, state: SpeCacheLayer, counts_F: Tensor) -> Any:
        """The next step's exact tokens into the layer's tables; returns the fetch of those that are not there yet."""

    def fetch(self, layer: int, state: SpeCacheLayer, host: HostStore, fetch: Any) -> None:
        """Copy pairs from the host into the layer's buffer."""


class ReferenceOps:
    """PyTorch on any device that can index the host store directly, that is: on the CPU."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.buffer_ops = BufferOps(context, chunk=1)

    def begin_step(self, step: Step) -> None:
        self.step = step

    def attend(self, layer: int, state: SpeCacheLayer, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        past_BKXPD = past_tokens(state, self.step.length_B)
        exists_BP = torch.arange(past_BKXPD.shape[3], device=q_BRHD.device) < self.step.length_B[:, None]
        allowed_BKP = exists_BP[:, None].expand(-1, past_BKXPD.shape[1], -1)
        self.probability_BKT = self._last_row(q_BRHD, k_BRKD, past_BKXPD[:, :, 0], allowed_BKP)
        return step_attention(q_BRHD, k_BRKD, v_BRKD, past_BKXPD, allowed_BKP)

    def _last_row(self, q_BRHD: Tensor, k_BRKD: Tensor, key_BKPD: Tensor, allowed_BKP: Tensor) -> Tensor:
        """The last row's attention by position, mean over the group's query heads; ``-inf`` where it may not choose."""
        rows, kv_heads = k_BRKD.shape[1:3]
        key_BKAD = torch.cat((key_BKPD, k_BRKD.transpose(1, 2)), dim=2)  # A = P + R
        q_BKGD = q_BRHD[:, -1].unflatten(1, (kv_heads, -1))
        logits_BKGA = (q_BKGD @ key_BKAD.transpose(2, 3)).float() * q_BRHD.shape[3] ** -0.5
        allowed_BKA = F.pad(allowed_BKP, (0, rows), value=True)
        mean_BKA = logits_BKGA.masked_fill(~allowed_BKA.unsqueeze(2), -torch.inf).softmax(dim=-1).mean(dim=2)
        past, position_B = key_BKPD.shape[2], self.step.length_B.clamp(max=self.context - 1)
        at = (torch.arange(len(position_B), device=position_B.device), slice(None), position_B)
        # Row 0's own place; a sequence that is full has none, and no row 0 to choose.
        mean_BKA[at] = torch.where(self.step.commit_B[:, None], mean_BKA[:, :, past], mean_BKA[at])
        position_T = torch.arange(self.context, device=position_B.device)
        beyond_B1T = (position_T >= self.step.candidates_B[:, None])[:, None]
        return mean_BKA[:, :, : self.context].masked_fill(beyond_B1T, -torch.inf)

    def commit(self, layer: int, state: SpeCacheLayer, host: HostStore, k_BKD: Tensor, v_BKD: Tensor) -> None:
        step = self.step
        state.cache.commit(k_BKD, v_BKD, step.length_B, step.commit_B)
        record_BKXCD = torch.stack((k_BKD, v_BKD), dim=2).unsqueeze(3)
        # A sequence that has ended may stand at the end of its capacity; nothing of it is written.
        host.write_chunk(layer, step.length_B.clamp(max=self.context - 1), record_BKXCD, step.commit_B)

    def choose(self, layer: int, state: SpeCacheLayer, counts_F: Tensor) -> ReferenceFetch:
        top_BKS = top_chunks(self.probability_BKT, state.chosen_BKS.shape[2])
        top_BKS = top_BKS.where(top_BKS < self.step.exact_from_B[:, None, None], NO_CHUNK)
        state.chosen_BKS.copy_(torch.where(self.step.chooses_B[:, None, None], top_BKS, state.chosen_BKS))
        counting = Counting(counts_F, self.step.commit_B)
        slot_BKS, fetch = self.buffer_ops.find(state.chosen_BKS, state.pairs, counting)
        state.slot_BKS.copy_(slot_BKS)
        return fetch

    def fetch(self, layer: int, state: SpeCacheLayer, host: HostStore, fetch: ReferenceFetch) -> None:
        self.buffer_ops.fetch(host, layer, fetch, state.pairs)


def past_tokens(state: SpeCacheLayer, length_B: Tensor) -> Tensor:
    """What attention sees of the past, ``[B, K, 2, P, D]`` by position: low bits, the ring, the exact pairs over them.

    P is one more than the cache's capacity: the last place takes what is not there.
    """
    cache = state.cache
    spare, slots = cache.tokens, cache.group
    past_BKXPD = F.pad(cache.dequantised(), (0, 0, 0, 1))
    slot_W = torch.arange(slots, device=length_B.device)
    position_BW = length_B[:, None] - 1 - (length_B[:, None] - 1 - slot_W) % slots
    filled_BW = window.filled_slots(slots, (length_B - slots).clamp(min=0), length_B)
    _scatter(past_BKXPD, torch.where(filled_BW, position_BW, spare)[:, None], cache.ring_BKXWD)
    exact_BKXSD = state.pairs.take(state.slot_BKS.long())[:, :, :, :, 0].transpose(2, 3)
    _scatter(past_BKXPD, or_spare(state.chosen_BKS, spare), exact_BKXSD)
    return past_BKXPD


def _scatter(past_BKXPD: Tensor, position_BKS: Tensor, values_BKXSD: Tensor) -> None:
    past_BKXPD.scatter_(3, position_BKS[:, :, None, :, None].expand_as(values_BKXSD), values_BKXSD)


class SpeCache(KVMethod):
    """A low-bit cache and a few exact pairs on the device, full KV on the host."""

    config_class = SpeCacheConfig
    capabilities = Capabilities(
        exact=False, recalls=True, offloads=True, dense=True, limits="recalls in low bits what row 1 did not foresee"
    )
    devices = ("cpu", "cuda")
    graphable = True
    rows = 2
    speculation = "self"
    config: SpeCacheConfig

    def allocate(self) -> None:
        model, ledger, config = self.model, self.ledger, self.config
        self.host = HostStore(model, config.host_sequences or self.batch, self.context, 1, self.dtype, ledger)
        self.layers = [self._allocate_layer() for _ in range(model.layers)]
        self.length_B = ledger.on_device("tables", (self.batch,), torch.int64)
        self.telemetry = Telemetry(model.layers, ledger)
        self.ops = self._make_ops()
        self.choice, self.prefetch = (SideStream(ledger.device, urgent=False) for _ in range(2))

    def _allocate_layer(self) -> SpeCacheLayer:
        model, ledger, config = self.model, self.ledger, self.config
        lead = (self.batch, model.kv_heads, config.top)
        return SpeCacheLayer(
            LowBitCache.allocate(model, self.batch, self.context, config.bits, config.group, self.dtype, ledger),
            ChunkBuffer.allocate(model, self.batch, config.top, 1, self.dtype, ledger),
            ledger.on_device("tables", lead, torch.int64).fill_(NO_CHUNK),
            ledger.on_device("tables", lead, torch.int32),
        )

    def _make_ops(self) -> Ops:
        return self.triton_ops() if self.device_type == "cuda" else ReferenceOps(self.context)

    def triton_ops(self) -> Ops:
        """The GPU's operations. Triton is imported only here, so that a CPU needs none."""
        from baselines.kernels.specache_ops import TritonOps

        return TritonOps(self.model, self.layers, batch=self.batch, context=self.context, ledger=self.ledger)

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """All tokens to the host, and in low bits to the device."""
        records_KNXCD = torch.stack((k_TKD, v_TKD), dim=2).transpose(0, 1).unsqueeze(3).contiguous()
        with self.prefetch.work():
            self.host.write_prompt(layer, sequence, records_KNXCD)
        self.prefetch.keep_alive(records_KNXCD)
        self.layers[layer].cache.write_prompt(sequence, k_TKD, v_TKD)
        self.length_B[sequence] = len(k_TKD)

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        self.prefetch.join()
        self.step = Step.begin(rows, self.length_B, commit_B, self.config.group)
        self.ops.begin_step(self.step)

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        state = self.layers[layer]
        # The scores of that layer must have been used before they are overwritten.
        self.choice.wait(layer - SCORE_BUFFERS)
        o_BRHD = self.ops.attend(layer, state, q_BRHD, k_BRKD, v_BRKD)
        self.ops.commit(layer, state, self.host, k_BRKD[:, 0], v_BRKD[:, 0])
        with self.choice.work(layer):
            fetch = self.ops.choose(layer, state, self.telemetry.counts[layer])
            if self.transfers:
                # On a stream of its own: the next layer's choice need not wait for this layer's copies.
                with self.prefetch.work():
                    self.ops.fetch(layer, state, self.host, fetch)
        return o_BRHD

    def end_step(self) -> None:
        # Before the lengths move: a choice that is still being made reads them.
        self.choice.join()
        self.prefetch.join()
        self.length_B += self.step.commit_B

    def read_bytes(self) -> int:
        cache, plan = self.layers[0].cache, self.ledger.plan().gpu
        low_bit_tokens = int((self.length_B - cache.group).clamp(min=0).sum())
        pairs = sum(state.pairs.records_BKSXCD.nbytes for state in self.layers)
        return int(low_bit_tokens * cache.token_bytes) * self.model.layers + plan["residual"] + pairs

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random codes with levels as of normal values, random records and recent tokens."""
        require(0 < tokens < self.context, "tokens", tokens, f"1 to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)
        for layer, state in enumerate(self.layers):
            state.cache.fill_random(generator)
            self.host.fill_normal(layer, generator)
        self.length_B.fill_(tokens)

    def statistics(self) -> dict[str, float]:
        """Bytes over the link of the steps that committed, and the counts of exact tokens that they are made of.

        selected: tokens chosen that had to be in the buffer; reused: of those, still there from the step before.
        Nothing is ever fetched on demand.
        """
        counts = self.telemetry.totals()
        return {
            "selected": counts["selected"],
            "reused": counts["hit"],
            "urgent_bytes": 0,
            "prefetched_bytes": (counts["selected"] - counts["hit"]) * self.host.record_bytes,
        }
