"""Random decode runs of one method without a model: prompts, steps, commit masks, and where every token ends up."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dualdecoder.config import MethodConfig, ModelConfig
from dualdecoder.method import KVMethod


def small_model(query_heads: int = 4, kv_heads: int = 2, head_dim: int = 8, layers: int = 2, **more) -> ModelConfig:
    """A shape for tests; only its heads, layers and rotation matter to a method."""
    return ModelConfig("small", layers, 8, 8, query_heads, kv_heads, head_dim, 8, 4096, **more)


@dataclass
class Tokens:
    """q, k, v of one layer and sequence, ``[T, heads, D]``, as far as they became part of the context."""

    q: Tensor
    k: Tensor
    v: Tensor

    def plus(self, q: Tensor, k: Tensor, v: Tensor) -> Tokens:
        pairs = zip((self.q, self.k, self.v), (q, k, v), strict=True)
        return Tokens(*(torch.cat((old, new[None])) for old, new in pairs))


@dataclass
class Drive:
    """Feeds a method with random tensors; ``tokens[layer][sequence]`` is the truth that a test recomputes from."""

    method: KVMethod
    seed: int = 0
    scale: float = 1.5
    tokens: list[list[Tokens]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self.generator) * self.scale
        return values.to(self.method.dtype).to(self.method.ledger.device)

    def qkv(self, *lead: int) -> tuple[Tensor, Tensor, Tensor]:
        m = self.method.model
        return tuple(self.normal(*lead, heads, m.head_dim) for heads in (m.query_heads, m.kv_heads, m.kv_heads))

    def prefill(self, lengths: list[int]) -> None:
        for layer in range(self.method.model.layers):
            self.tokens.append([])
            for sequence, length in enumerate(lengths):
                q, k, v = self.qkv(length)
                self.method.prefill_layer(sequence, layer, q, k, k, v)
                self.tokens[layer].append(Tokens(q, k, v))

    def step(self, commit: list[bool]) -> list[tuple[list[Tokens], Tensor]]:
        """One step; per layer what each sequence attended from (its context and the row itself) and the output."""
        method, results = self.method, []
        rows = [self.qkv(method.batch, 1) for _ in range(method.model.layers)]
        method.begin_step(1, torch.tensor(commit, device=method.ledger.device))
        for layer, (q, k, v) in enumerate(rows):
            if method.foresees and layer + 1 < len(rows):
                method.foresee(layer + 1, rows[layer + 1][0])
            output = method.attend(layer, q, k, v).clone()
            context = [t.plus(q[b, 0], k[b, 0], v[b, 0]) for b, t in enumerate(self.tokens[layer])]
            kept = zip(commit, context, self.tokens[layer], strict=True)
            self.tokens[layer] = [new if committed else old for committed, new, old in kept]
            results.append((context, output))
        method.end_step()
        return results


def make(
    kind: type[KVMethod], config: MethodConfig, batch: int, context: int, device: str = "cpu",
    with_kernels: bool = False, seed: int = 0, **shape
) -> Drive:  # fmt: skip
    """A method in fp32 and its drive. ``with_kernels``: what it does on a GPU, on a CPU in Triton's interpreter."""
    sizes = {"batch": batch, "context": context, "dtype": torch.float32, "device": device}
    return Drive(kind(small_model(**shape), config, **sizes, planned_for="cuda" if with_kernels else None), seed)


def attention(q_HD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Dense attention of one row over the given tokens, from its definition, ``[H, D]``."""
    group = q_HD.shape[0] // k_TKD.shape[1]
    k_THD, v_THD = (t.float().repeat_interleave(group, dim=1) for t in (k_TKD, v_TKD))
    weight_TH = (torch.einsum("hd,thd->th", q_HD.float(), k_THD) * q_HD.shape[-1] ** -0.5).softmax(dim=0)
    return torch.einsum("th,thd->hd", weight_TH, v_THD)
