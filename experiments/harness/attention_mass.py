"""How much of dense attention a method's selected set captures, watched from outside on the CPU.

For methods that select chunks and heed ``rewrite`` (the DualDecoder family). Dense probabilities are those of the
method's own queries over all keys of the context: the prompt's from the snapshot, the later ones as they are committed.
Suffixes: B sequences, R rows, H query heads, K KV heads, G = H / K, D head size, N chunks, P context tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dualdecoder.landmarks import mark_chunks
from dualdecoder.method import KVMethod
from dualdecoder.prefill import PrefillSnapshot

_NEEDED = ("chunks_B", "slots", "layers")


def can_watch(method: KVMethod) -> bool:
    """Whether the method's sets can be seen: chunks beside outliers, and steps not replayed from a CUDA graph."""
    selects = all(hasattr(method, name) for name in _NEEDED) and hasattr(method.layers[0], "outliers_BKO")
    return selects and method.device_type == "cpu"


class MassWatch:
    """Attached to a method of one sequence; ``masses`` grows by the mean over heads for each layer and full step."""

    def __init__(self, method: KVMethod, snapshot: PrefillSnapshot) -> None:
        self.method, self.masses = method, []
        self.keys = [k_TKD.transpose(0, 1) for _, _, k_TKD, _ in snapshot.layers]
        self._begin_attention, method.begin_attention = method.begin_attention, self._watched
        method.rewrite = self._see

    def _see(self, layer: int, chosen_BKS: Tensor, predicted_BKS: Tensor) -> tuple[Tensor, Tensor]:
        self.chosen_BKS = chosen_BKS
        return chosen_BKS, predicted_BKS

    def _watched(
        self, micro_batch: int, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor
    ) -> Callable[[], Tensor]:
        attend = self._begin_attention(micro_batch, layer, q_BRHD, k_BRKD, v_BRKD)

        def attend_and_look() -> Tensor:
            o_BRHD = attend()
            # A step of fewer rows comes before decoding and commits nothing.
            if q_BRHD.shape[1] == self.method.rows:
                self.keys[layer] = torch.cat((self.keys[layer], k_BRKD[0, 0][:, None]), dim=1)
                self.masses.append(self._mass(layer, q_BRHD[0, 0]))
            return o_BRHD

        return attend_and_look

    def _mass(self, layer: int, q_HD: Tensor) -> float:
        k_KPD = self.keys[layer]
        q_KGD = q_HD.unflatten(0, (len(k_KPD), -1))
        probability_KGP = (q_KGD @ k_KPD.transpose(-1, -2) * q_HD.shape[-1] ** -0.5).float().softmax(dim=-1)
        return float((probability_KGP * self._attended(layer, k_KPD.shape[1])[:, None]).sum(dim=-1).mean())

    def _attended(self, layer: int, tokens: int) -> Tensor:
        """Bool ``[K, P]``: chosen chunks, outliers, and everything that is not in a chunk yet."""
        chunks, size = int(self.method.chunks_B[0]), self.method.config.chunk
        sets_BKS = torch.cat((self.chosen_BKS, self.method.layers[layer].outliers_BKO), dim=-1)
        marked_KN = mark_chunks(sets_BKS, int(self.method.chunks))[0, :, :chunks]
        window_KP = torch.ones(len(marked_KN), tokens - chunks * size, dtype=torch.bool)
        return torch.cat((marked_KN.repeat_interleave(size, dim=-1), window_KP), dim=-1)
