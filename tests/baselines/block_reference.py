"""Blocks and their bounds from the definition, in plain Python and numpy, for the tests of Quest and OasisKV."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualdecoder.method import KVMethod

BLOCK = 16


def bound(q_GD: np.ndarray, keys_CD: np.ndarray) -> float:
    """An upper bound of the sum of the queries' products with a key between the block's extremes."""
    low, high = keys_CD.min(axis=0), keys_CD.max(axis=0)
    return sum(sum(max(x * a, x * b) for x, a, b in zip(q, low, high, strict=True)) for q in q_GD)


def best_blocks(q_GD: np.ndarray, keys_TD: np.ndarray, blocks: int, count: int) -> list[int]:
    """The ``count`` of the first ``blocks`` blocks with the largest bounds, best first."""
    scores = [bound(q_GD, keys_TD[n * BLOCK : (n + 1) * BLOCK]) for n in range(blocks)]
    return sorted(range(blocks), key=lambda n: (-scores[n], n))[:count]


def tokens_of(blocks: Iterable[int]) -> list[int]:
    return [t for n in sorted(blocks) for t in range(n * BLOCK, (n + 1) * BLOCK)]


def attention(q_D: np.ndarray, keys_TD: np.ndarray, values_TD: np.ndarray, seen: list[int]) -> np.ndarray:
    logits = keys_TD[seen] @ q_D / np.sqrt(q_D.size)
    weights = np.exp(logits - logits.max())
    return weights @ values_TD[seen] / weights.sum()


@dataclass(frozen=True)
class Layer:
    """Queries, keys and values of one layer for a text of T tokens, ``[T, heads, D]``."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor

    @classmethod
    def random(cls, tokens: int, query_heads: int, kv_heads: int, head_dim: int) -> "Layer":
        return cls(*(torch.randn(tokens, heads, head_dim) for heads in (query_heads, kv_heads, kv_heads)))

    @property
    def tokens(self) -> int:
        return len(self.k_TKD)

    def of_head(self, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries ``[T, G, D]``, keys and values ``[T, D]`` of one KV head."""
        group = self.q_THD.shape[1] // self.k_TKD.shape[1]
        q_TGD = self.q_THD[:, group * head : group * (head + 1)]
        return tuple(t.double().numpy() for t in (q_TGD, self.k_TKD[:, head], self.v_TKD[:, head]))


def fill(method: KVMethod, layers: list[Layer], prompt: int, sequence: int = 0) -> None:
    """Hand the first ``prompt`` tokens to every layer of one sequence."""
    for number, layer in enumerate(layers):
        k_TKD = layer.k_TKD[:prompt]
        method.prefill_layer(sequence, number, layer.q_THD[:prompt], k_TKD, k_TKD, layer.v_TKD[:prompt])


def walk(method: KVMethod, layers: list[Layer], prompt: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Decode the rest of the text, one token a step; yields position of row 0 and every layer's output."""
    fill(method, layers, prompt)
    for position in range(prompt, layers[0].tokens - method.rows + 1):
        rows = slice(position, position + method.rows)
        method.begin_step(method.rows, torch.tensor([True]))
        tensors = [(t.q_THD[None, rows], t.k_TKD[None, rows], t.v_TKD[None, rows]) for t in layers]
        outputs = [method.attend(number, *qkv) for number, qkv in enumerate(tensors)]
        method.end_step()
        yield position, outputs


@dataclass
class ResidentSet:
    """The resident blocks of one KV head by slot, and when each was last predicted. Plain lists and dicts."""

    slots: list[int | None]
    used: dict[int, int]

    @classmethod
    def first(cls, blocks: list[int], size: int, clock: int) -> "ResidentSet":
        return cls(sorted(blocks) + [None] * (size - len(blocks)), dict.fromkeys(blocks, clock))

    def admit(self, predicted: list[int], cap: int, clock: int) -> list[tuple[int, int]]:
        """Follow a prediction, best block first; returns (block, slot) of what is brought in."""
        for block in predicted:
            if block in self.used:
                self.used[block] = clock
        brought = []
        for block in [block for block in predicted if block not in self.used][:cap]:
            slot = self._victim(predicted)
            if self.slots[slot] is not None:
                del self.used[self.slots[slot]]
            self.slots[slot], self.used[block] = block, clock
            brought.append((block, slot))
        return brought

    def _victim(self, predicted: list[int]) -> int:
        if None in self.slots:
            return self.slots.index(None)
        free = [slot for slot, block in enumerate(self.slots) if block not in predicted]
        return min(free, key=lambda slot: (self.used[self.slots[slot]], slot))
