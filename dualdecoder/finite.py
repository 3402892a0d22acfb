"""Logits that are not finite: found where tokens are chosen, and said with the dtype and what to try.

Suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualdecoder.errors import NotFiniteError

_TRY = {
    torch.float16: "float16 ends at 65,504; try dtype bfloat16 or float32",
    torch.bfloat16: "try dtype float32; if that does not help, the checkpoint holds such numbers itself",
    torch.float32: "the checkpoint holds or makes such numbers itself; nothing but another one helps",
}


def finite_rows(logits_BV: Tensor) -> Tensor:
    """Bool ``[B]``: whether all logits of a row are finite. One pass, and no wait for the device."""
    low_B, high_B = logits_BV.aminmax(dim=-1)
    return low_B.isfinite() & high_B.isfinite()


def require_finite(finite: Sequence[bool], dtype: torch.dtype, active: Sequence[bool] | None = None) -> None:
    """Raise ``NotFiniteError`` naming the first sequence that is not finite; only those that are ``active`` count."""
    for sequence, good in enumerate(finite):
        if not good and (active is None or active[sequence]):
            raise not_finite(sequence, "the model's logits", dtype)


def not_finite(sequence: int, what: str, dtype: torch.dtype) -> NotFiniteError:
    """The error for ``what`` (in the plural) of a sequence."""
    name = str(dtype).removeprefix("torch.")
    return NotFiniteError(f"sequence {sequence}: {what} are not finite (NaN or infinite) in {name}; {_TRY[dtype]}")
