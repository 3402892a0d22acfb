"""Keys before rotation as a product of two thin factors, and the keys that come back from it.

Key row t of all KV heads side by side (``[T, K D]``) is about ``left[t] @ right``: the truncated singular value
decomposition of a prompt's keys, computed jointly over the heads (ShadowKV, arXiv 2410.21465, section 4.1 and
algorithm 1). The left factor has orthonormal columns and is shared by the heads; the singular values are in the right.
Suffixes: B sequences, T tokens, K KV heads, D head size, F = K D key columns, U kept columns (the rank), N chunks,
C tokens of a chunk, S chunks of one request, P = D / 2 frequency pairs, Z = cosine and sine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualdecoder.config import ModelConfig
from dualdecoder.ledger import Ledger
from dualdecoder.rope import inverse_frequencies, rotate


def factorise(keys_TF: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors ``[T, U]`` and ``[U, F]`` of the best approximation of this rank (at most F).

    From the eigenvectors of the F x F Gram matrix instead of a thin SVD of the tall matrix, which costs many times as
    much: the eigenvectors are the right singular vectors, the projections on them the left ones times the singular
    values. Squaring the singular values blurs only directions that matter less than rounding does; the projection
    is taken from the keys themselves, so what is returned is a projection of the keys to rounding in any case.
    On a CPU in fp64; on a GPU in fp32, where fp64 may be slow.
    """
    keys_TF = keys_TF.to(torch.float32 if keys_TF.is_cuda else torch.float64)
    # In ascending order of the eigenvalues.
    vectors_FF = torch.linalg.eigh(keys_TF.T @ keys_TF).eigenvectors
    vectors_FU = vectors_FF[:, -rank:].flip(1)
    projected_TU = keys_TF @ vectors_FU
    singular_U = projected_TU.norm(dim=0)
    # The product does not depend on how its size is shared; a column of zeros stays one.
    left_TU = projected_TU / singular_U.clamp(min=torch.finfo(torch.float32).tiny)
    return left_TU, singular_U[:, None] * vectors_FU.T


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of any position of a prompt, by a table that all layers and sequences share.

    table_TZP: cosines and sines as ``Decoder.rotation`` gives them, in the model's dtype: keys that come back from the
    factors are turned by the same numbers as those of the prefill. Computing them anew would cost a rebuild more than
    its products do.
    """

    table_TZP: Tensor

    @classmethod
    def of(cls, model: ModelConfig, positions: int, dtype: torch.dtype, ledger: Ledger) -> Rotation:
        """The table of the first ``positions`` positions."""
        frequency_P, scale = inverse_frequencies(model.rope, model.head_dim)
        table_TZP = ledger.on_device("rotation", (positions, 2, len(frequency_P)), dtype)
        if ledger.device.type != "meta":
            angle_TP = torch.arange(positions)[:, None].float() * frequency_P
            table_TZP.copy_(torch.stack((angle_TP.cos(), angle_TP.sin()), dim=1) * scale)
        return cls(table_TZP)

    def __call__(self, keys_XD: Tensor, position_X: Tensor) -> Tensor:
        """Rotate fp32 keys ``[..., D]`` to their positions ``[...]``."""
        cos_1YP, sin_1YP = self.table_TZP[position_X.reshape(1, -1)].float().unbind(dim=2)
        keys_1Y1D = keys_XD.reshape(1, -1, 1, keys_XD.shape[-1])
        return rotate(keys_1Y1D, cos_1YP, sin_1YP).view_as(keys_XD)


@dataclass(frozen=True)
class LowRankKeys:
    """One layer's keys of all chunks: left_BNCU, a row a token, and right_BKUD, which stays in the GPU's L2 cache."""

    left_BNCU: Tensor
    right_BKUD: Tensor
    rotation: Rotation

    @classmethod
    def allocate(
        cls, model: ModelConfig, rotation: Rotation, *, batch: int, chunks: int, chunk: int, rank: int,
        dtype: torch.dtype, ledger: Ledger,
    ) -> LowRankKeys:  # fmt: skip
        """Room for ``chunks`` chunks a sequence; ``rank`` is cut to the number of key columns."""
        rank = min(rank, model.kv_heads * model.head_dim)
        return cls(
            ledger.on_device("left_factors", (batch, chunks, chunk, rank), dtype),
            ledger.on_device("right_factors", (batch, model.kv_heads, rank, model.head_dim), dtype),
            rotation,
        )

    @property
    def rank(self) -> int:
        return self.right_BKUD.shape[2]

    def write_prompt(self, sequence: int, k_pre_rope_TKD: Tensor, chunks: int) -> None:
        """Factorise all keys of a prompt; keep the rows of its first ``chunks`` chunks."""
        left_TU, right_UF = factorise(k_pre_rope_TKD.flatten(1), self.rank)
        left_NCU = self.left_BNCU[sequence, :chunks]
        left_NCU.copy_(left_TU[: chunks * left_NCU.shape[1]].view_as(left_NCU))
        right_KUD = self.right_BKUD[sequence]
        right_KUD.copy_(right_UF.unflatten(1, (len(right_KUD), -1)).transpose(0, 1))

    def rebuilt(self, chunk_BKS: Tensor) -> Tensor:
        """Rotated keys ``[B, K, S, C, D]`` of the chunks, in the factors' dtype; entries below 0 give chunk 0.

        Products and rotation are in fp32.
        """
        chunk_BKS = chunk_BKS.clamp(min=0)
        b = torch.arange(len(chunk_BKS), device=chunk_BKS.device)[:, None, None]
        left_BKMU = self.left_BNCU[b, chunk_BKS].float().flatten(2, 3)  # M = S C
        tokens = self.left_BNCU.shape[2]
        keys_BKSCD = (left_BKMU @ self.right_BKUD.float()).unflatten(2, (-1, tokens))
        position_BKSC = chunk_BKS.unsqueeze(-1) * tokens + torch.arange(tokens, device=chunk_BKS.device)
        return self.rotation(keys_BKSCD, position_BKSC).to(self.left_BNCU.dtype)

    def fill_normal(self, generator: torch.Generator) -> None:
        """Random factors, for measuring without a prompt."""
        self.left_BNCU.normal_(generator=generator)
        self.right_BKUD.normal_(std=self.rank**-0.5, generator=generator)

    def part(self, sequences: slice) -> LowRankKeys:
        """The same memory, of some of the sequences."""
        return LowRankKeys(self.left_BNCU[sequences], self.right_BKUD[sequences], self.rotation)
