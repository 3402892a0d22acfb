"""Dense KV in host memory, streamed through the device layer by layer (as FlexGen does it): exact, limited by the link.

Two device buffers hold one layer's cache each. When a layer's attention is done with its buffer, the copy of the layer
after the next into it is started on a side stream, wrapping into the next step's first two layers; so the next layer's
copy is under way while a layer computes, and the link waits only between steps, which end with all copies done. The new
token is written by the attention kernel straight into the host's cache.
A copy takes the planned capacity, not the used length: lengths are known to the device only, and a copy's size is fixed
when a step becomes a CUDA graph. Sequences of one batch should therefore be of about the planned context.
Suffixes: A host sequences, B sequences, R rows, T tokens, H query heads, K KV heads, D head size, P tokens of capacity,
X = K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.dense import DenseMethod
from dualdecoder.config import MethodConfig
from dualdecoder.errors import require
from dualdecoder.ledger import Ledger
from dualdecoder.method import Capabilities
from dualdecoder.transfer import SideStream

BUFFERS = 2


@dataclass(frozen=True)
class FullOffloadConfig(MethodConfig):
    """Settings of full offload.

    host_sequences: sequences that the host keeps KV for; 0 for all. Fewer share it, for measuring transfers only.
    """

    host_sequences: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.host_sequences >= 0, "host_sequences", self.host_sequences, "0 (all) or a number of sequences")


class HostCache:
    """Keys and values of all layers, ``[A, K, 2, P, D]`` each; sequence b uses host sequence b modulo A."""

    def __init__(self, layers: int, shape: tuple[int, ...], dtype: torch.dtype, ledger: Ledger) -> None:
        self.kv = ledger.on_host("kv", layers, shape, dtype)

    def write_prompt(self, layer: int, sequence: int, kv_KXTD: Tensor) -> None:
        """Store a prompt; from a GPU the copies are asynchronous on the current stream."""
        kept_KXPD = self.kv[layer][sequence % len(self.kv[layer])]
        for kv_TD, kept_PD in zip(kv_KXTD.flatten(0, 1), kept_KXPD.flatten(0, 1), strict=True):
            # Both sides are dense here: one plain copy each.
            kept_PD[: len(kv_TD)].copy_(kv_TD, non_blocking=True)

    def read_layer(self, layer: int, buffer_BKXPD: Tensor) -> None:
        """Copy a layer's whole cache: one plain copy, or as many as it takes to serve all from fewer sequences."""
        for part in buffer_BKXPD.split(len(self.kv[layer])):
            part.copy_(self.kv[layer][: len(part)], non_blocking=True)

    def fill_normal(self, generator: torch.Generator) -> None:
        """Random values, made on the generator's device, for measuring without a prompt."""
        for kv_KXPD in (sequence for layer in self.kv for sequence in layer):
            values = torch.empty(kv_KXPD.shape, dtype=kv_KXPD.dtype, device=generator.device)
            kv_KXPD.copy_(values.normal_(generator=generator), non_blocking=True)


class FullOffload(DenseMethod):
    """All keys and values on the host; every step copies all of them and attends to all of them."""

    config_class = FullOffloadConfig
    copies_layers = True
    capabilities = Capabilities(exact=True, recalls=True, offloads=True)
    config: FullOffloadConfig

    def allocate(self) -> None:
        super().allocate()
        model, ledger = self.model, self.ledger
        require(model.layers >= BUFFERS, "model.layers", model.layers, f"at least {BUFFERS} for alternating buffers")
        # With an odd number of layers the buffers swap roles between steps.
        self.graphable = model.layers % BUFFERS == 0
        host_sequences = min(self.config.host_sequences or self.batch, self.batch)
        self.host = HostCache(model.layers, (host_sequences, *self.cache_shape), self.dtype, ledger)
        shape = (self.batch, *self.cache_shape)
        self.buffers = [ledger.on_device("buffers", shape, self.dtype) for _ in range(BUFFERS)]
        self.copied = ledger.on_device("tables", (1,), torch.int64)
        self.copies = SideStream(ledger.device, urgent=False)
        self.turn = 0
        self.primed = False

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        kv_KXTD = torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3).contiguous()
        with self.copies.work():
            self.host.write_prompt(layer, sequence, kv_KXTD)
        self.copies.keep_alive(kv_KXTD)
        self.length_B[sequence] = len(k_TKD)
        self.primed = False

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        super().begin_step(rows, commit_B)
        self.copies.join()
        if not self.primed:
            for layer in range(BUFFERS):
                self._start_copy(layer, self.turn + layer)
            self.primed = True

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        self.copies.wait(self.turn % BUFFERS)
        buffer = self.buffers[self.turn % BUFFERS]
        home = self.host.kv[layer] if self.transfers else buffer
        o_BRHD = self.attention(q_BRHD, k_BRKD, v_BRKD, buffer, home, self.length_B, self.commit_B)
        self._start_copy((layer + BUFFERS) % self.model.layers, self.turn)
        self.turn += 1
        return o_BRHD

    def end_step(self) -> None:
        super().end_step()
        self.copied += self.model.layers * self.transfers
        self.copies.join()

    def _start_copy(self, layer: int, turn: int) -> None:
        """Bring a layer's cache into the buffer of that turn, once the compute stream has done with it."""
        if self.transfers:
            with self.copies.work(turn % BUFFERS):
                self.host.read_layer(layer, self.buffers[turn % BUFFERS])

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random keys and values in the host's cache."""
        require(0 < tokens < self.context, "tokens", tokens, f"1 to {self.context - 1}")
        self.host.fill_normal(torch.Generator(self.ledger.device).manual_seed(seed))
        self.length_B.fill_(tokens)
        self.primed = False

    def statistics(self) -> dict[str, float]:
        """Link bytes of the layers copied in finished steps; all are fetched ahead, and the whole capacity crosses."""
        return {"urgent_bytes": 0, "prefetched_bytes": int(self.copied) * self.buffers[0].nbytes}
