"""Settings of the rotary position embedding, read whole from transformers' ``rope_parameters`` or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualdecoder.errors import require, shortened

# Which entries each kind reads. Any other entry would change the result for whoever wrote it, and not for us.
KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
ROPE_KINDS = tuple(KEYS)
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": KEYS["llama3"],
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
}
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
MOST_TOKENS = 2**31 - 1
MOST = 1e6


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; field meanings as in transformers' ``rope_parameters``.

    pair_factors: what each of the D/2 frequencies is divided by (``longrope`` only, one list for every position).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    pair_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.kind in ROPE_KINDS, "rope.kind", self.kind, ", ".join(ROPE_KINDS))
        # At 1 the wavelengths of all pairs are equal, and YaRN's bounds divide by the logarithm.
        _require_number("rope.theta", self.theta, 1 if self.kind == "yarn" else 0, 1e30, open_below=True)
        _require_number("rope.factor", self.factor, 1, MOST)
        _require_integer("rope.original_context", self.original_context)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _require_number(f"rope.{name}", getattr(self, name), 0, MOST, open_below=True)
        for name in ("mscale", "mscale_all_dim"):
            _require_number(f"rope.{name}", getattr(self, name), 0, MOST)
        if self.attention_factor is not None:
            _require_number("rope.attention_factor", self.attention_factor, 0, MOST, open_below=True)
        for number, divisor in enumerate(self.pair_factors):
            _require_number(f"rope.pair_factors[{number}]", divisor, 0, MOST, open_below=True)
        self._require_order()

    def _require_order(self) -> None:
        above = f"a number above low_freq_factor ({self.low_freq_factor})"
        require(
            self.kind != "llama3" or self.high_freq_factor > self.low_freq_factor,
            "rope.high_freq_factor",
            self.high_freq_factor,
            above,
        )
        require(isinstance(self.truncate, bool), "rope.truncate", self.truncate, "true or false")

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], max_positions: int) -> RopeConfig:
        """Read ``rope_parameters`` as transformers standardises them (with ``rope_type`` and ``rope_theta``).

        max_positions: the model's ``max_position_embeddings``; YaRN with ``factor: null`` means its ratio to the
        original length. Raises ``ConfigError`` for an entry that the kind does not read, one that it needs and does
        not find, and one of the wrong type or size.
        """
        kind, given = _entries(parameters)
        original = given.get("original_max_position_embeddings", max_positions)
        _require_integer("rope_parameters.original_max_position_embeddings", original)
        default_factor = max_positions / original if kind == "yarn" else 1.0
        return cls(
            theta=given["rope_theta"],
            kind=kind,
            factor=given.get("factor", default_factor),
            original_context=original,
            low_freq_factor=given.get("low_freq_factor", 1.0),
            high_freq_factor=given.get("high_freq_factor", 4.0),
            # As in transformers: zero and null mean the default.
            beta_fast=given.get("beta_fast") or 32.0,
            beta_slow=given.get("beta_slow") or 1.0,
            attention_factor=given.get("attention_factor"),
            mscale=given.get("mscale", 0.0),
            mscale_all_dim=given.get("mscale_all_dim", 0.0),
            truncate=parameters.get("truncate", True),
            pair_factors=_pair_factors(given),
        )

    def context(self, max_positions: int) -> int:
        """Tokens that the model is made for: YaRN's original length times its factor, else ``max_positions``."""
        return int(self.original_context * self.factor) if self.kind == "yarn" else max_positions

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.kind != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0


def _entries(parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind and its entries that are not null, none unknown and none missing."""
    for name, value in parameters.items():
        nested = isinstance(value, dict)
        require(not nested, f"rope_parameters[{shortened(repr(name), 80)}]", value, "one set of entries for all layers")
    kind = parameters.get("rope_type")
    require(isinstance(kind, str) and kind in KEYS, "rope_parameters.rope_type", kind, ", ".join(ROPE_KINDS))
    given = {name: value for name, value in parameters.items() if value is not None}
    known = (*_COMMON, *KEYS[kind])
    for name, value in given.items():
        require(
            name in known,
            f"rope_parameters[{shortened(repr(name), 80)}]",
            value,
            f"with rope_type={kind}: {', '.join(known)}",
        )
    require(kind != "yarn" or "factor" in parameters, "rope_parameters.factor", None, "a number, or null for the ratio")
    for name in ("rope_theta", *NEEDED[kind]):
        require(name in given, f"rope_parameters.{name}", None, f"a value, which rope_type={kind} needs")
    partial = parameters.get("partial_rotary_factor", 1.0)
    require(partial == 1.0, "rope_parameters.partial_rotary_factor", partial, "1.0")
    return kind, given


def _pair_factors(given: Mapping[str, Any]) -> tuple[float, ...]:
    short, long = given.get("short_factor", []), given.get("long_factor", [])
    # Two lists mean other keys beyond the original length, and keys that are already kept would have to be redone.
    same = isinstance(short, list) and short == long
    require(same, "rope_parameters.short_factor", short, "a list equal to long_factor")
    return tuple(short)


def _require_integer(name: str, value: object) -> None:
    good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_TOKENS
    require(good, name, value, f"an integer from 1 to {MOST_TOKENS}")


def _require_number(name: str, value: Any, least: float, most: float, open_below: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = number and least <= value <= most and not (open_below and value == least)
    require(good, name, value, f"a number {'above' if open_below else 'from'} {least:g}, at most {most:g}")
