"""Checks of single values that a user gives: of the right kind, and in range. Nothing here imports torch."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from dualdecoder.errors import require


def require_integer(field: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ``ConfigError`` unless ``value`` is an integer of ``least`` to ``most`` (numpy's are; a bool is not)."""
    span = f"of at least {least}" if most is None else f"from {least} to {most}"
    good = is_integer(value) and least <= value and (most is None or value <= most)
    require(good, field, value, f"an integer {span}")


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer of Python or numpy; True is none here, though Python says so."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite real number of Python or numpy."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
