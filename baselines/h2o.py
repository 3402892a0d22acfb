"""H2O (arXiv 2306.14048): a fixed number of tokens a KV head, those that received most attention and the newest ones.

A token's score is the probability it has received, in fp32, summed over all queries since it was written and over the
query heads that share its KV head. Prefill is exact and dense; the scores of a prompt are the column sums of its causal
attention, from a second pass in blocks. A step attends to what is kept and to its own token, adds its probabilities to
the scores, and once all places are taken puts its token where the least score outside the recent window was.
Keys keep the rotation of their position in the text. Old tokens have collected more terms than young ones: that is the
method. Of equal scores the older token goes first. Each KV head keeps its own tokens, in places of any order.
Suffixes: L layers, B sequences, R = 1 row, T tokens, M queries of a block, H query heads, K KV heads, G = H / K,
D head size, P = heavy + recent places, X = K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.config import MethodConfig
from dualdecoder.errors import require
from dualdecoder.method import Capabilities, KVMethod

QUERY_BLOCK = 256


@dataclass(frozen=True)
class H2OConfig(MethodConfig):
    """Settings of H2O.

    heavy: tokens a KV head keeps for their score.
    recent: newest tokens that are never evicted, the one just decoded counted.
    """

    heavy: int = 1232
    recent: int = 1232

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heavy", "recent"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a positive number of tokens")

    @property
    def attended_tokens(self) -> int:
        """Most tokens a row attends to, itself not counted."""
        return self.heavy + self.recent


def column_sums(q_THD: Tensor, k_TKD: Tensor) -> Tensor:
    """Probability that each token receives from itself and all later queries of the group, fp32 ``[K, T]``."""
    q_KGTD = q_THD.unflatten(1, (k_TKD.shape[1], -1)).permute(1, 2, 0, 3)
    k_K1TD = k_TKD.transpose(0, 1)[:, None].float()
    sums_KT = torch.zeros(k_TKD.shape[1::-1], dtype=torch.float32, device=k_TKD.device)
    for begin, q_KGMD in _blocks(q_KGTD):
        seen = begin + q_KGMD.shape[2]
        logits_KGMT = q_KGMD.float() @ k_K1TD[:, :, :seen].transpose(-1, -2) * q_THD.shape[-1] ** -0.5
        later_MT = torch.ones(seen - begin, seen, dtype=torch.bool, device=k_TKD.device).triu(begin + 1)
        sums_KT[:, :seen] += logits_KGMT.masked_fill(later_MT, -torch.inf).softmax(dim=-1).sum(dim=(1, 2))
    return sums_KT


def _blocks(q_KGTD: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, q_KGTD.shape[2], QUERY_BLOCK):
        yield begin, q_KGTD[:, :, begin : begin + QUERY_BLOCK]


def kept_tokens(sums_KT: Tensor, heavy: int, recent: int) -> Tensor:
    """Positions ``[K, P]`` that a prompt leaves, ascending: the newest, and the largest sums among the others."""
    tokens = sums_KT.shape[1]
    if tokens <= heavy + recent:
        return torch.arange(tokens, device=sums_KT.device).expand(len(sums_KT), -1)
    # Ascending and stable: of equal sums, the newer ones are at the end.
    heavy_KP = sums_KT[:, : tokens - recent].sort(dim=-1, stable=True).indices[:, -heavy:].sort(dim=-1).values
    recent_KP = torch.arange(tokens - recent, tokens, device=sums_KT.device).expand(len(sums_KT), -1)
    return torch.cat((heavy_KP, recent_KP), dim=1)


class H2O(KVMethod):
    """Keys, values, scores and positions of the kept tokens, on the device."""

    config_class = H2OConfig
    capabilities = Capabilities(
        exact=False,
        recalls=False,
        offloads=False,
        limits="A token that got little attention until it left the recent window is dropped and cannot be recalled.",
    )
    devices = ("cpu", "cuda")
    graphable = True
    config: H2OConfig

    def allocate(self) -> None:
        model, ledger = self.model, self.ledger
        self.places = min(self.config.attended_tokens, self.context)
        lead = (model.layers, self.batch, model.kv_heads)
        self.kv_LBKXPD = ledger.on_device("kv", (*lead, 2, self.places, model.head_dim), self.dtype)
        self.score_LBKP = ledger.on_device("scores", (*lead, self.places), torch.float32)
        self.position_LBKP = ledger.on_device("tables", (*lead, self.places), torch.int64)
        self.length_B = ledger.on_device("tables", (self.batch,), torch.int64)
        self.place_P = ledger.on_device("tables", (self.places,), torch.int64)
        torch.arange(self.places, device=ledger.device, out=self.place_P)
        if self.device_type == "cuda":
            self._allocate_workspace()

    def _allocate_workspace(self) -> None:
        from baselines.kernels.ring_attention import RingWorkspace

        model, ledger = self.model, self.ledger
        heads = (model.query_heads, model.kv_heads, model.head_dim)
        self.workspace = RingWorkspace.allocate(ledger, self.batch, *heads, self.places, keep_logits=True)
        self.o_BRHD = ledger.on_device("workspace", (self.batch, 1, model.query_heads, model.head_dim), self.dtype)

    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """Keep the newest tokens and those that the prompt's own queries attended to most."""
        sums_KT = self._column_sums(q_THD, k_TKD)
        position_KP = kept_tokens(sums_KT, self.config.heavy, self.config.recent)
        head_K1, places = torch.arange(len(position_KP), device=k_TKD.device)[:, None], position_KP.shape[1]
        for half, x_TKD in enumerate((k_TKD, v_TKD)):
            self.kv_LBKXPD[layer, sequence, :, half, :places] = x_TKD[position_KP, head_K1]
        self.score_LBKP[layer, sequence, :, :places] = sums_KT.gather(1, position_KP)
        self.position_LBKP[layer, sequence, :, :places] = position_KP
        self.length_B[sequence] = len(k_TKD)

    def _column_sums(self, q_THD: Tensor, k_TKD: Tensor) -> Tensor:
        if self.device_type != "cuda":
            return column_sums(q_THD, k_TKD)
        from baselines.kernels import column_sums as kernel

        return kernel.column_sums(q_THD, k_TKD)

    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        self.commit_B = commit_B
        self.filled_B = self.length_B.clamp(max=self.places)

    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        if self.device_type == "cuda":
            return self._attend_on_gpu(layer, q_BRHD, k_BRKD, v_BRKD)
        own_BKXD = torch.stack((k_BRKD[:, 0], v_BRKD[:, 0]), dim=2)
        o_BRHD, received_BKP = self._attend(q_BRHD, self.kv_LBKXPD[layer], own_BKXD)
        self._account(layer, received_BKP, own_BKXD)
        return o_BRHD

    def _attend(self, q_BRHD: Tensor, kv_BKXPD: Tensor, own_BKXD: Tensor) -> tuple[Tensor, Tensor]:
        """Output, and the probability that each place and, last, the row itself receive from the group, fp32."""
        k_BKPD, v_BKPD = torch.cat((kv_BKXPD, own_BKXD[:, :, :, None]), dim=3).float().unbind(2)
        q_BKGD = q_BRHD[:, 0].unflatten(1, (k_BKPD.shape[1], -1)).float()
        logits_BKGP = q_BKGD @ k_BKPD.transpose(-1, -2) * q_BRHD.shape[-1] ** -0.5
        empty_BP = self.place_P >= self.filled_B[:, None]
        logits_BKGP[..., :-1].masked_fill_(empty_BP[:, None, None], -torch.inf)
        probability_BKGP = logits_BKGP.softmax(dim=-1)
        o_BKGD = probability_BKGP @ v_BKPD
        return o_BKGD.flatten(1, 2)[:, None].to(q_BRHD.dtype), probability_BKGP.sum(dim=2)

    def _account(self, layer: int, received_BKP: Tensor, own_BKXD: Tensor) -> None:
        """Where committed: add to the scores, then let the row's token take a free or the least place."""
        score_BKP, position_BKP = self.score_LBKP[layer], self.position_LBKP[layer]
        score_BKP += received_BKP[..., :-1] * self.commit_B[:, None, None]
        place_BK = self._place_to_take(score_BKP, position_BKP)
        taken_BKP = (self.place_P == place_BK[..., None]) & self.commit_B[:, None, None]
        score_BKP.copy_(torch.where(taken_BKP, received_BKP[..., -1:], score_BKP))
        position_BKP.copy_(torch.where(taken_BKP, self.length_B[:, None, None], position_BKP))
        kv_BKXPD = self.kv_LBKXPD[layer]
        kv_BKXPD.copy_(torch.where(taken_BKP[:, :, None, :, None], own_BKXD[:, :, :, None], kv_BKXPD))

    def _place_to_take(self, score_BKP: Tensor, position_BKP: Tensor) -> Tensor:
        newer_BKP = position_BKP > (self.length_B - self.config.recent)[:, None, None]
        outside_BKP = score_BKP.masked_fill(newer_BKP, torch.inf)
        tied_BKP = (outside_BKP == outside_BKP.amin(dim=-1, keepdim=True)) & ~newer_BKP
        oldest_BK = position_BKP.masked_fill(~tied_BKP, torch.iinfo(torch.int64).max).argmin(dim=-1)
        return torch.where((self.filled_B < self.places)[:, None], self.filled_B[:, None], oldest_BK)

    def _attend_on_gpu(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        from baselines.kernels.heavy_hitters import Kept, Step, merge_and_account
        from baselines.kernels.ring_attention import attend_splits

        kept = Kept(self.kv_LBKXPD[layer], self.score_LBKP[layer], self.position_LBKP[layer])
        attend_splits(q_BRHD, *kept.kv_BKXPD.unbind(2), self.filled_B, self.workspace)
        step = Step(self.length_B, self.filled_B, self.commit_B)
        own = (k_BRKD, v_BRKD)
        return merge_and_account(q_BRHD, *own, kept, step, self.config.recent, self.workspace, self.o_BRHD)

    def end_step(self) -> None:
        self.length_B += self.commit_B

    def read_bytes(self) -> int:
        state = (self.kv_LBKXPD[:, 0, :, :, 0], self.score_LBKP[:, 0, :, 0], self.position_LBKP[:, 0, :, 0])
        return int(self.length_B.clamp(max=self.places).sum()) * sum(place.nbytes for place in state)

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Random keys, values and scores; heavy tokens spread evenly, then the newest. No prefill pass."""
        require(0 < tokens < self.context, "tokens", tokens, f"1 to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)
        self.kv_LBKXPD.normal_(generator=generator)
        self.score_LBKP.uniform_(generator=generator)
        heavy, evicted = self.config.heavy, max(0, tokens - self.places)
        spread_P = self.place_P * (heavy + evicted) // heavy
        self.position_LBKP.copy_(spread_P.where(self.place_P < heavy, self.place_P + evicted))
        self.length_B.fill_(tokens)
