"""StreamingLLM (arXiv 2309.17453): a few first tokens ("sinks") and the newest ones; everything between is evicted.

Positions are those in the cache, not in the text: once tokens are evicted, the sinks move up to the window. Only
distances matter to rotary embedding, and the distances among recent tokens are the same in the cache and in the text.
So recent keys stay as the engine rotated them, the query too, and the sinks are rotated on by the number of evicted
tokens: rotations add up, R(evicted) R(j) = R(evicted + j), which puts sink j at its distance in the cache. The scale
that YaRN puts on cosines and sines is in the sinks already, and the further rotation has none.
Prefill is exact and dense, as for every method here; tokens are dropped after it. Evicted tokens are gone.
Place ``p`` of the cache: sinks first, then a ring; the place of position n >= sinks is sinks + (n - sinks) % window.
Suffixes: L layers, B sequences, R rows, T tokens, H query heads, K KV heads, D head size, S sinks, P = S + window
places, X = K and V, F = D / 2 frequency pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.attention import step_attention
from dualdecoder.config import MethodConfig
from dualdecoder.errors import require
from dualdecoder.method import Capabilities, KVMethod
from dualdecoder.rope import inverse_frequencies, rotate


@dataclass(frozen=True)
class StreamingLLMConfig(MethodConfig):
    """Settings of StreamingLLM.

    sinks: first tokens of the text that are always kept.
    window: newest tokens that are kept, the one being decoded not counted.
    """

    sinks: int = 4
    window: int = 2460

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.sinks >= 0, "sinks", self.sinks, "0 or more tokens")
        require(self.window >= 1, "window", self.window, "a positive number of tokens")

    @property
    def attended_tokens(self) -> int:
        """Most tokens a row attends to, itself not counted."""
        return self.sinks + self.window


class StreamingLLM(KVMethod):
    """Sinks and a ring of the newest tokens on the device."""

    config_class = StreamingLLMConfig
    capabilities = Capabilities(
        exact=False,
        recalls=False,
        offloads=False,
        limits="Tokens between the first few and the recent window are dropped: nothing in them can be recalled.",
    )
    devices = ("cpu", "cuda")
    graphable = True
    config: StreamingLLMConfig

    def allocate(self) -> None:
        model, ledger, sinks = self.model, self.ledger, self.config.sinks
        lead = (model.layers, self.batch, model.kv_heads)
        self.places = min(self.config.attended_tokens, max(self.context, sinks + 1))
        self.kv_LBKXPD = ledger.on_device("kv", (*lead, 2, self.places, model.head_dim), self.dtype)
        # The sinks' keys at their positions in the text; the cache has them rotated on.
        self.sinks_LBKSD = ledger.on_device("kv", (*lead, sinks, model.head_dim), self.dtype)
        self.length_B = ledger.on_device("tables", (self.batch,), torch.int64)
        self.frequency_F = ledger.on_device("tables", (model.head_dim // 2,), torch.float32)
        self.frequency_F.copy_(inverse_frequencies(model.rope, model.head_dim)[0])
        self.place_P = ledger.on_device("tables", (self.places,), torch.int64)
        torch.arange(self.places, device=ledger.device, out=self.place_P)
        if self.device_type == "cuda":
            from baselines.kernels.ring_attention import RingAttention

            self.attention = RingAttention(model, self.batch, self.places, self.dtype, ledger)

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """Keep the first and the newest tokens of the exact prefill."""
        tokens, sinks = len(k_TKD), self.config.sinks
        position_T = torch.arange(tokens, device=k_TKD.device)
        position_T = position_T[(position_T < sinks) | (position_T >= tokens - (self.places - sinks))]
        kv_KXTD = torch.stack((k_TKD, v_TKD)).permute(2, 0, 1, 3)
        self.kv_LBKXPD[layer, sequence, :, :, self._place(position_T)] = kv_KXTD[:, :, position_T]
        self.sinks_LBKSD[layer, sequence, :, :tokens] = kv_KXTD[:, 0, :sinks]
        self.length_B[sequence] = tokens

    def _place(self, position: Tensor) -> Tensor:
        sinks = self.config.sinks
        return position.where(position < sinks, sinks + (position - sinks) % (self.places - sinks))

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        self.commit_B = commit_B
        self.filled_B = self.length_B.clamp(max=self.places)
        self.new_place_B = self._place(self.length_B)
        self._move_sinks(self.length_B - self.filled_B)

    def _move_sinks(self, evicted_B: Tensor) -> None:
        """Rotate all layers' sinks on by the number of evicted tokens."""
        cached_LBKSD = self.kv_LBKXPD[:, :, :, 0, : self.config.sinks]
        # Until something is evicted the cache has them where they are in the text, decoded ones too.
        in_place_B = (evicted_B == 0)[:, None, None, None]
        self.sinks_LBKSD.copy_(torch.where(in_place_B, cached_LBKSD, self.sinks_LBKSD))
        angle_1BF = (evicted_B[:, None].float() * self.frequency_F)[None]
        moved_LBMD = rotate(self.sinks_LBKSD.flatten(2, 3).float(), angle_1BF.cos(), angle_1BF.sin())
        cached_LBKSD.copy_(moved_LBMD.view(self.sinks_LBKSD.shape))

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        kv_BKXPD = self.kv_LBKXPD[layer]
        if self.device_type == "cuda":
            return self._attend_on_gpu(q_BRHD, k_BRKD, v_BRKD, kv_BKXPD)
        allowed_BKP = (self.place_P < self.filled_B[:, None])[:, None].expand(-1, kv_BKXPD.shape[1], -1)
        o_BRHD = step_attention(q_BRHD, k_BRKD, v_BRKD, kv_BKXPD, allowed_BKP)
        self._append(k_BRKD, v_BRKD, kv_BKXPD)
        return o_BRHD

    def _append(self, k_BRKD: Tensor, v_BRKD: Tensor, kv_BKXPD: Tensor) -> None:
        at = (torch.arange(self.batch, device=self.length_B.device), slice(None), slice(None), self.new_place_B)
        new_BKXD = torch.stack((k_BRKD[:, 0], v_BRKD[:, 0]), dim=2)
        kv_BKXPD[at] = torch.where(self.commit_B[:, None, None, None], new_BKXD, kv_BKXPD[at])

    def _attend_on_gpu(self, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, kv_BKXPD: Tensor) -> Tensor:
        from baselines.kernels.ring_attention import Append

        to = Append(self.new_place_B, self.commit_B)
        return self.attention(q_BRHD, k_BRKD, v_BRKD, *kv_BKXPD.unbind(2), self.filled_B, to)

    def end_step(self) -> None:
        self.length_B += self.commit_B

    def read_bytes(self) -> int:
        place_bytes = self.kv_LBKXPD[:, 0, :, :, 0].nbytes
        return int(self.length_B.clamp(max=self.places).sum()) * place_bytes

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random keys and values in every place."""
        require(0 < tokens < self.context, "tokens", tokens, f"1 to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)
        for tensor in (self.kv_LBKXPD, self.sinks_LBKSD):
            tensor.normal_(generator=generator)
        self.length_B.fill_(tokens)
