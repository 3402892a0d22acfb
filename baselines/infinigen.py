"""InfiniGen (OSDI 2024, arXiv 2406.19707): fetch for the next layer the tokens that a guess at its query asks for.

Full KV in host memory, one record a token and KV head. On the device, per token, a few columns of its key behind an
orthogonal matrix A: (q A) . (k A) = q . k, and A gathers what matters to the scores in few columns. In each step the
input of layer l - 1, projected by layer l, guesses layer l's query; the guess's scores on the partial keys choose
tokens, whose records cross the link while layer l - 1 still computes. Layer l attends to them and to its own token.

Choices where the source leaves room, or where grouped heads and a GPU need them:
- A and the columns come from the sequence's own prompt, where the source takes A from another text once: no text has to
  be picked, and this should favour the method. A's columns are the eigenvectors of q' q, that is the right singular
  vectors of the prompt's queries (behind rotation, those of a KV head's group together). The source also orders the
  columns; as columns are picked by size, order changes nothing. Picked: largest mean |q A| plus mean |k A|.
  Their number is ``ratio`` of the head size, rounded up to a multiple of 8 for aligned reads.
- A token's score in a group is the maximum over the query heads of its logit less that head's largest: for one head a
  group it orders and counts as the source does.
- n, how many tokens are fetched, is the mean over the KV heads of the number of tokens scoring above -alpha, rounded
  down, at most ``cap``. The source averages over the batch too; here sequences do not depend on one another.
- The source gathers on the CPU and waits for n; here a kernel reads host memory and n stays on the device.
- The first ``dense_layers`` layers load everything in every step, as in the source: at 122,880 tokens of an 8B model
  0.5 GB a sequence and layer, about 10 ms. On a GPU, layer 0's transfer for the next step starts as soon as the last of
  them has been attended to.
Suffixes: B sequences, R = 1 row, T tokens of capacity, N queries of a prompt, H query heads, K KV heads, G = H / K,
D head size, J columns, S = cap slots, X = K and V, C = 1 token of a record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.infinigen_ops import (
    InfiniGenOps,
    ReferenceOps,
    guessed_scores,
    skew,
    top_tokens,
    wanted_tokens,
)
from dualdecoder.buffers import ChunkBuffer
from dualdecoder.config import MethodConfig
from dualdecoder.errors import require
from dualdecoder.host_store import HostStore
from dualdecoder.method import Capabilities, KVMethod
from dualdecoder.transfer import SideStream

# One for the layer that computes, one for the layer that is being fetched.
BUFFERS = 2
COLUMN_MULTIPLE = 8


@dataclass(frozen=True)
class InfiniGenConfig(MethodConfig):
    """Settings of InfiniGen.

    alpha: a token is wanted if its guessed logit is less than this below the head's largest.
    ratio: share of the key's columns that the device keeps.
    cap: most tokens fetched per KV head and step, the row's own not counted.
    dense_layers: first layers that load the whole context in every step; at least one, for nothing foresees layer 0.
    host_sequences: sequences that the host keeps KV for; 0 for all. Fewer share it, for measuring transfers only.
    """

    alpha: float | int = 5.0
    ratio: float = 0.3
    cap: int = 2463
    dense_layers: int = 2
    host_sequences: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, "alpha", self.alpha, "a positive number")
        require(0 < self.ratio <= 1, "ratio", self.ratio, "a number above 0, at most 1")
        require(self.cap >= 1, "cap", self.cap, "a positive number of tokens")
        require(self.dense_layers >= 1, "dense_layers", self.dense_layers, "at least 1 layer")
        require(self.host_sequences >= 0, "host_sequences", self.host_sequences, "0 (all) or a number of sequences")

    @property
    def attended_tokens(self) -> int:
        """Most tokens a row of a layer that is not dense attends to, itself counted."""
        return self.cap + 1


class InfiniGen(KVMethod):
    """Full KV on the host; partial keys, two buffers of chosen tokens and, on a GPU, one whole layer on the device."""

    config_class = InfiniGenConfig
    capabilities = Capabilities(
        exact=False,
        recalls=True,
        offloads=True,
        limits="The whole context of the first layers crosses the link in every step.",
    )
    devices = ("cpu", "cuda")
    graphable = True
    foresees = True
    copies_layers = True
    config: InfiniGenConfig

    def allocate(self) -> None:
        model, config, ledger = self.model, self.config, self.ledger
        self.slots = min(config.cap, self.context)
        self.dense = range(min(config.dense_layers, model.layers))
        columns = math.ceil(config.ratio * model.head_dim / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        self.columns = min(model.head_dim, columns)
        self.host = HostStore(model, config.host_sequences or self.batch, self.context, 1, self.dtype, ledger)
        sizes = (model, self.batch, self.slots, 1, self.dtype, ledger)
        self.buffers = [ChunkBuffer.allocate(*sizes) for _ in range(BUFFERS)]
        self.length_B = ledger.on_device("tables", (self.batch,), torch.int64)
        self.wanted_LB = ledger.on_device("tables", (model.layers, self.batch), torch.int64)
        # Rows committed, and tokens wanted by them per KV head, summed over the layers that choose.
        self.counts = ledger.on_device("tables", (2,), torch.int64)
        self.skews, self.partials = zip(*[self._allocate_layer(layer) for layer in range(model.layers)], strict=True)
        self.urgent = SideStream(ledger.device, urgent=True)
        self.prefetch = SideStream(ledger.device, urgent=False)
        self.guesses: list[Tensor | None] = [None] * BUFFERS
        self.layer_0_is_here = False
        self.ops = self._make_ops()

    def _make_ops(self) -> InfiniGenOps:
        if self.device_type != "cuda":
            return ReferenceOps(self.config.alpha, self.slots)
        from baselines.kernels.infinigen import TritonOps

        sizes = (self.batch, self.context, self.slots)
        return TritonOps(self.model, self.config.alpha, *sizes, dtype=self.dtype, ledger=self.ledger)

    def _allocate_layer(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        if layer in self.dense:
            return None, None
        lead, model = (self.batch, self.model.kv_heads), self.model
        skew_BKDJ = self.ledger.on_device("skews", (*lead, model.head_dim, self.columns), self.dtype)
        return skew_BKDJ, self.ledger.on_device("partial keys", (*lead, self.context, self.columns), self.dtype)

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """All tokens to the host; the partial keys stay on the device."""
        records_KTXCD = torch.stack((k_TKD, v_TKD), dim=2).transpose(0, 1).unsqueeze(3).contiguous()
        with self.prefetch.work():
            self.host.write_prompt(layer, sequence, records_KTXCD)
        self.prefetch.keep_alive(records_KTXCD)
        self.length_B[sequence], self.layer_0_is_here = len(k_TKD), False
        if layer in self.dense:
            return
        for head, k_TD in enumerate(k_TKD.unbind(1)):
            q_TGD = q_THD[:, head * self.model.group : (head + 1) * self.model.group]
            skew_DJ = skew(q_TGD, k_TD, self.columns).to(self.dtype)
            self.skews[layer][sequence, head] = skew_DJ
            self.partials[layer][sequence, head, : len(k_TD)] = k_TD @ skew_DJ

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        self.prefetch.join()
        self.commit_B = commit_B
        if not self.layer_0_is_here:
            self._load(0)
            self.layer_0_is_here = True

    def foresee(self, layer: int, q_BRHD: Tensor) -> None:
        """Choose and fetch the layer's tokens beside what the compute stream does for the layer before."""
        if layer in self.dense:
            return
        # Held until after the layer has waited for the stream that reads it.
        self.guesses[layer % BUFFERS] = q_BRHD
        buffer = self.buffers[layer % BUFFERS]
        with self.prefetch.work(layer % BUFFERS):
            query_BKGJ = q_BRHD[:, 0].unflatten(1, (self.model.kv_heads, -1)) @ self.skews[layer]
            self.ops.choose(query_BKGJ, self.partials[layer], self.length_B, self.wanted_LB[layer], buffer)
            if self.transfers:
                self.ops.fetch(self.host, layer, buffer)

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        own = (k_BRKD[:, 0], v_BRKD[:, 0])
        if layer not in self.dense:
            self.prefetch.wait(layer % BUFFERS)
            if self.observe:
                self.observe(layer, self._true_set(layer, q_BRHD), self.buffers[layer % BUFFERS].held_BKS)
            partial = (self.skews[layer], self.partials[layer])
            o_BRHD = self.ops.attend(q_BRHD, k_BRKD, v_BRKD, self.buffers[layer % BUFFERS], self.wanted_LB[layer])
            self.ops.append(*own, self.host, layer, partial, self.length_B, self.commit_B)
            return o_BRHD
        self.urgent.wait()
        o_BRHD = self.ops.attend_to_all(q_BRHD, k_BRKD, v_BRKD, self.length_B)
        self.ops.append(*own, self.host, layer, None, self.length_B, self.commit_B)
        # The layer's buffer is free: for the next dense layer, after the last of them for the next step's first.
        self._load((layer + 1) % len(self.dense))
        return o_BRHD

    def _true_set(self, layer: int, q_BRHD: Tensor) -> Tensor:
        """The tokens that the layer's own query asks for, chosen as by the guess; a sequence at a time for memory."""
        query_BKGJ = q_BRHD[:, 0].unflatten(1, (self.model.kv_heads, -1)) @ self.skews[layer]
        scale, sets = self.model.head_dim**-0.5, []
        for sequence in range(self.batch):
            one = slice(sequence, sequence + 1)
            scores_1KT = guessed_scores(query_BKGJ[one], self.partials[layer][one], self.length_B[one], scale)
            wanted_1 = wanted_tokens(scores_1KT, self.config.alpha, self.slots)
            sets.append(top_tokens(scores_1KT, wanted_1, self.slots))
        return torch.cat(sets)

    def remark(self) -> str:
        dense = len(self.dense)
        return f"at most {self.slots} tokens a KV head; all tokens of {dense} layers cross the link in every step"

    def _load(self, layer: int) -> None:
        if self.transfers:
            with self.urgent.work():
                self.ops.load(self.host, layer)

    def end_step(self) -> None:
        self.counts += torch.stack((self.commit_B.sum(), (self.wanted_LB * self.commit_B).sum()))
        self.length_B += self.commit_B
        self.urgent.join()
        self.prefetch.join()

    def read_bytes(self) -> int:
        """Of chosen tokens, as many as the cap allows."""
        tokens, heads = int(self.length_B.sum()), self.model.kv_heads
        chosen = int(self.length_B.clamp(max=self.slots).sum())
        a_token = self.columns * self.dtype.itemsize
        sparse = self.model.layers - len(self.dense)
        record = self.host.record_bytes
        return heads * (len(self.dense) * tokens * record + sparse * (tokens * a_token + chosen * record))

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random records, partial keys and columns. With logits of such keys, n is about as large as the cap."""
        require(0 < tokens < self.context, "tokens", tokens, f"1 to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)
        for layer in range(self.model.layers):
            self.host.fill_normal(layer, generator)
            if layer not in self.dense:
                self.skews[layer].normal_(0, self.model.head_dim**-0.5, generator=generator)
                self.partials[layer].normal_(generator=generator)
        self.length_B.fill_(tokens)
        self.layer_0_is_here = False

    def statistics(self) -> dict[str, float]:
        """Bytes over the link, and ``mean_wanted``: tokens a KV head fetched in a layer that chooses (n).

        Of the dense layers, the first one's transfer is counted as prefetched. They are moved in full capacity.
        """
        rows, wanted = self.counts.tolist()
        a_token = self.model.kv_heads * self.host.record_bytes
        whole = rows * self.context * a_token
        chosen = rows * (self.model.layers - len(self.dense))
        return {
            "urgent_bytes": (len(self.dense) - 1) * whole,
            "prefetched_bytes": whole + wanted * a_token,
            "mean_wanted": wanted / chosen if chosen else math.nan,
        }
