"""ShadowKV (arXiv 2410.21465; github.com/ByteDance-Seed/ShadowKV): low-rank keys on the device, values on the host.

The specification is the public reference class, for any batch: keys are factorised before rotation, jointly over the KV
heads; landmarks, outlier chunks and the selection are those that DualDecoder took over; every selected key is rebuilt
from its factors, also the first time (the public batched class starts with exact keys); outliers, the local window and
generated tokens are exact. Generated tokens are never chunked nor dropped: the engine refuses a longer answer than
``generated``; who drives the method without it must count.
The sparse buffer of a layer keeps the rotated keys and values of the last selection. Chunks selected again stay; of the
others, values cross the link on one side stream while keys are rebuilt on another.
A layer's values cannot be asked for before its selection, and no other work of the layer is left then but the rebuild:
link and compute units would wait for each other. So a large batch is taken in parts that take turns through the layers
(micro-batches): while the values of one cross the link, another computes. Every part reads the weights once more.

Device bytes that grow with the prompt, Llama-3-8B in 16 bits, all layers: left factors 160 x 2 x 32 = 10,240 a token,
landmarks 8 x 128 x 2 / 8 x 32 = 8,192; together 18,432. The public code also keeps the chunk numbers of landmarks,
256 a token, which are not needed where excluded chunks are masked; 18,688 with them. Scores and look-up tables, shared
by the layers, add 19; cosines and sines, shared by the sequences too, 256 a position.
Suffixes: B sequences, R rows (1), T tokens, H query heads, K KV heads, D head size, N chunks, S selected chunks,
C tokens of a chunk, X = K and V.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from baselines.low_rank import LowRankKeys, Rotation
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import ChunkConfig
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.landmarks import NO_CHUNK
from dualdecoder.method import Capabilities, KVMethod
from dualdecoder.ops import Counting, History, LayerState, Ops, ReferenceFetch, ReferenceOps
from dualdecoder.telemetry import Telemetry, share
from dualdecoder.transfer import SideStream

# By a trial on an H200 of which no record is kept: two parts a little faster at this batch, slower at half of it.
SEQUENCES_OF_TWO_PARTS = 8
COUNTS = ("selected", "hit", "urgent", "reused", "comparable")
# (a layer's factors, misses, buffer): rebuild the keys of the misses into their slots.
Rebuild = Callable[[LowRankKeys, Any, ChunkBuffer], None]


@dataclass(frozen=True)
class ShadowKVConfig(ChunkConfig):
    """Settings of ShadowKV, besides those of ``ChunkConfig``.

    rank: columns of the factors; cut to the number of key columns (KV heads times head size).
    generated: most tokens that can be generated after a prompt; they take device memory from the start.
    parts: parts of the batch that take turns; 0: on a GPU two for a large batch, otherwise one.
    """

    rank: int = 160
    generated: int = 1024
    parts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rank >= 1, "rank", self.rank, "a positive number of columns")
        require(self.generated >= 1, "generated", self.generated, "a positive number of tokens")
        require(self.parts >= 0, "parts", self.parts, "0 (chosen by the batch) or a number of parts")

    @property
    def attended_tokens(self) -> int:
        """Tokens of a long prompt that a step attends to: selected, outliers, local window.

        The tail of the prompt (less than a chunk) and the generated tokens come on top.
        """
        return self.budget + self.outliers * self.chunk + self.local


@dataclass(frozen=True)
class Part:
    """Some of the sequences: views of their memory by layer, and operations with workspaces of their own."""

    sequences: slice
    ops: Ops
    layers: list[LayerState]
    keys: list[LowRankKeys]
    buffers: list[ChunkBuffer]
    selected: list[Tensor]


class ShadowKV(KVMethod):
    """Factors, landmarks, outliers, window and the last selection on the device; values of all chunks on the host."""

    config_class = ShadowKVConfig
    capabilities = Capabilities(
        exact=False, recalls=True, offloads=True, limits="at most `generated` tokens after a prompt"
    )
    devices = ("cpu", "cuda")
    graphable = True
    config: ShadowKVConfig

    def allocate(self) -> None:
        config = self.config
        self.decode_capacity = config.generated
        self.chunks = max(1, (self.context - config.local) // config.chunk)
        self.slots = min(config.budget // config.chunk, self.chunks)
        self.started = self.comparable = False
        self._allocate_memory()
        self.rebuild = self._make_rebuild()
        self.micro_batches = self._split()
        self.parts = [self._make_part(sequences) for sequences in self.micro_batches]
        self.link = SideStream(self.ledger.device, urgent=True)
        # A rebuild waits for scattered reads, which the other part's matrix products do not mind.
        self.rebuilding = SideStream(self.ledger.device, urgent=False)

    def _allocate_memory(self) -> None:
        model, config, ledger = self.model, self.config, self.ledger
        layers, chunk = range(model.layers), config.chunk
        sequences = config.host_sequences or self.batch
        self.host = HostStore(model, sequences, self.chunks, chunk, self.dtype, ledger, halves=1)
        self.length_B = ledger.on_device("tables", (self.batch,), torch.int64)
        self.chunks_B = ledger.on_device("tables", (self.batch,), torch.int64)
        shared = {"chunks": self.chunks, "chunk": chunk, "dtype": self.dtype, "ledger": ledger}
        lengths, kept = (self.length_B, self.chunks_B), {"outliers": config.outliers, "window": self._window_tokens()}
        self.layers = [LayerState.allocate(model, *lengths, **kept, **shared) for _ in layers]
        rotation = Rotation.of(model, self.chunks * chunk, self.dtype, ledger)
        factors = {"batch": self.batch, "rank": config.rank}
        self.keys = [LowRankKeys.allocate(model, rotation, **factors, **shared) for _ in layers]
        self.buffers = [ChunkBuffer.allocate(model, self.batch, self.slots, chunk, self.dtype, ledger) for _ in layers]
        table = (self.batch, model.kv_heads, self.slots)
        self.selected = [ledger.on_device("tables", table, torch.int64).fill_(NO_CHUNK) for _ in layers]
        self.telemetry = Telemetry(model.layers, ledger)

    def _window_tokens(self) -> int:
        """Local window, tail and generated tokens, in whole chunks; never more than the context."""
        config = self.config
        most = config.local + config.chunk - 1 + config.generated
        return math.ceil(min(most, self.context) / config.chunk) * config.chunk

    def _split(self) -> tuple[slice, ...]:
        takes_turns = self.device_type == "cuda" and self.batch >= SEQUENCES_OF_TWO_PARTS
        parts = min(self.config.parts or (2 if takes_turns else 1), self.batch)
        bounds = [part * self.batch // parts for part in range(parts + 1)]
        return tuple(slice(begin, end) for begin, end in pairwise(bounds))

    def _make_part(self, sequences: slice) -> Part:
        layers, keys, buffers = (
            [state.part(sequences) for state in states] for states in (self.layers, self.keys, self.buffers)
        )
        return Part(sequences, self._make_ops(sequences), layers, keys, buffers, [t[sequences] for t in self.selected])

    def _make_ops(self, sequences: slice) -> Ops:
        if self.device_type != "cuda":
            return ReferenceOps(self.chunks, self.config.chunk, first=sequences.start)
        return self.triton_ops(sequences)

    def triton_ops(self, sequences: slice) -> Ops:
        """The GPU's operations. Triton is imported only here and below, so that a CPU needs none."""
        from dualdecoder.kernels.ops import TritonOps

        state = self.layers[0]
        return TritonOps(
            self.model, batch=sequences.stop - sequences.start, rows=1, chunk=self.config.chunk, chunks=self.chunks,
            slots=self.slots, outliers=state.outliers_BKO.shape[-1], window=state.window_BKXWD.shape[3], buffers=0,
            dtype=self.dtype, ledger=self.ledger, first=sequences.start,
        )  # fmt: skip

    def _make_rebuild(self) -> Rebuild:
        return self.triton_rebuild() if self.device_type == "cuda" else _rebuild

    def triton_rebuild(self) -> Rebuild:
        """The GPU's form of ``_rebuild``."""
        from baselines.kernels.rebuild_keys import rebuild_keys

        return lambda keys, misses, buffer: rebuild_keys(keys, misses, buffer.records_BKSXCD)

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """Factors, landmarks and outliers of the chunks, their values to the host; window and tail as they are."""
        chunk = self.config.chunk
        chunks = max(0, (len(k_TKD) - self.config.local) // chunk)
        if chunks:
            self.keys[layer].write_prompt(sequence, k_pre_rope_TKD, chunks)
            self._keep_chunks(sequence, layer, _chunked(k_TKD, chunks, chunk), _chunked(v_TKD, chunks, chunk))
        self.layers[layer].keep_rest(sequence, chunks * chunk, k_TKD, v_TKD)
        self.buffers[layer].held_BKS[sequence] = NO_CHUNK
        self.length_B[sequence], self.chunks_B[sequence] = len(k_TKD), chunks

    def _keep_chunks(self, sequence: int, layer: int, k_KN1CD: Tensor, v_KN1CD: Tensor) -> None:
        with self.link.work():
            self.host.write_prompt(layer, sequence, v_KN1CD)
        self.link.keep_alive(v_KN1CD)
        self.layers[layer].keep_chunks(sequence, torch.cat((k_KN1CD, v_KN1CD), dim=2))

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        require(rows == 1, "rows", rows, "1: this method has no second row")
        self.comparable, self.started = self.started, True
        self.link.join()
        self.rebuilding.join()
        self.commit_B = commit_B
        for part in self.parts:
            part.ops.begin_step(self.chunks_B[part.sequences])

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        given = [[t[part.sequences] for t in (q_BRHD, k_BRKD, v_BRKD)] for part in self.parts]
        calls = [self.begin_attention(number, layer, *tensors) for number, tensors in enumerate(given)]
        return torch.cat([call() for call in calls])

    def begin_attention(
        self, micro_batch: int, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor
    ) -> Callable[[], Tensor]:
        chosen_BKS, slot_BKS = self._bring_in(micro_batch, layer, q_BRHD)
        return partial(self._attend, micro_batch, layer, q_BRHD, k_BRKD, v_BRKD, chosen_BKS, slot_BKS)

    def _attend(
        self, number: int, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, chosen_BKS: Tensor,
        slot_BKS: Tensor,
    ) -> Tensor:  # fmt: skip
        part = self.parts[number]
        state = part.layers[layer]
        self.link.wait(number)
        self.rebuilding.wait(number)
        if self.observe:
            self.observe(layer, chosen_BKS, part.buffers[layer].present(chosen_BKS, slot_BKS))
        o_BRHD = part.ops.attend(q_BRHD, k_BRKD, v_BRKD, state, part.buffers[layer], chosen_BKS, slot_BKS)
        part.ops.append(k_BRKD[:, 0], v_BRKD[:, 0], state, self.commit_B[part.sequences])
        return o_BRHD

    def _bring_in(self, number: int, layer: int, q_BRHD: Tensor) -> tuple[Tensor, Tensor]:
        """Select for one part, and start what its buffer lacks; returns chosen chunks and their slots."""
        part = self.parts[number]
        buffer, chosen_BKS = part.buffers[layer], part.ops.select(q_BRHD, part.layers[layer], self.slots)[:, 0]
        if self.rewrite:
            chosen_BKS, _ = self.rewrite(layer, chosen_BKS, chosen_BKS)
        # Nothing is predicted: what is remembered for the next step is this step's selection.
        history = History(part.selected[layer], part.selected[layer], chosen_BKS, self.comparable)
        counting = Counting(self.telemetry.counts[layer], self.commit_B[part.sequences], history)
        slot_BKS, misses = part.ops.find(chosen_BKS, buffer, counting)
        if self.transfers:
            with self.link.work(number):
                part.ops.fetch(self.host, layer, misses, buffer)
        with self.rebuilding.work(number):
            self.rebuild(part.keys[layer], misses, buffer)
        return chosen_BKS, slot_BKS

    def end_step(self) -> None:
        self.length_B += self.commit_B

    def read_bytes(self) -> int:
        """Landmarks, K and V of all attended tokens, right factors once, and a left row per rebuilt token and KV head.

        The share of the selection that is rebuilt is that measured so far; without a step, all of it.
        """
        chunk, counts = self.config.chunk, self.telemetry.totals()
        selected, outliers = (int(self.chunks_B.clamp(max=most).sum()) for most in (self.slots, self._outlier_places))
        beside = int((self.length_B - self.chunks_B * chunk).sum())
        misses = share(counts["urgent"], counts["selected"]) if counts["selected"] else 1.0
        keys, heads = self.keys[0], self.model.kv_heads
        token = heads * self.model.head_dim * self.dtype.itemsize
        landmarks = int(self.chunks_B.sum()) * token
        attended = 2 * token * ((selected + outliers) * chunk + beside)
        factors = keys.right_BKUD.nbytes + misses * selected * heads * chunk * keys.rank * self.dtype.itemsize
        return round(self.model.layers * (landmarks + attended + factors))

    @property
    def _outlier_places(self) -> int:
        return self.layers[0].outliers_BKO.shape[-1]

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random factors, landmarks, window and values; outliers spread evenly."""
        local, chunk = self.config.local, self.config.chunk
        require(local < tokens < self.context, "tokens", tokens, f"{local + 1} to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)
        chunks = (tokens - local) // chunk
        for layer, (state, keys) in enumerate(zip(self.layers, self.keys, strict=True)):
            self.host.fill_normal(layer, generator)
            state.fill_normal(chunks, generator)
            keys.fill_normal(generator)
        self.length_B.fill_(tokens)
        self.chunks_B.fill_(chunks)

    def statistics(self) -> dict[str, float]:
        """Chunk counts, link bytes, and shares of the selection: ``hit_rate``, ``reuse`` (of the last step's set)."""
        counts = self.telemetry.totals()
        return {
            **{name: counts[name] for name in COUNTS},
            "urgent_bytes": counts["urgent"] * self.host.record_bytes,
            "prefetched_bytes": 0,
            "hit_rate": share(counts["hit"], counts["selected"]),
            "reuse": share(counts["reused"], counts["comparable"]),
        }


def _rebuild(keys: LowRankKeys, misses: ReferenceFetch, buffer: ChunkBuffer) -> None:
    buffer.put(misses.slot_BKS, keys.rebuilt(misses.chunk_BKS).unsqueeze(3), misses.where_BKS, half=0)


def _chunked(x_TKD: Tensor, chunks: int, chunk: int) -> Tensor:
    """The first chunks as records of one half, ``[K, N, 1, C, D]``."""
    return x_TKD[: chunks * chunk].unflatten(0, (chunks, 1, chunk)).permute(3, 0, 1, 2, 4).contiguous()
