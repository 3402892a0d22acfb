"""Numbers of tokens as people write them: 131072, 128K, 1M."""

from __future__ import annotations

import re
from fractions import Fraction

from dualdecoder.errors import ConfigError

_FACTORS = {"": 1, "K": 1024, "M": 1024**2}
# The digits are bounded, so that no text becomes a number that takes long to read.
_TOKENS = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KkMm]?)")


def parse_tokens(value: str | int, field: str = "tokens") -> int:
    """The number of tokens that ``value`` means: a whole number, or one with K (1024) or M (1024 * 1024).

    An integer comes back as it is. Raises ``ConfigError`` naming ``field`` for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _TOKENS.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        tokens = Fraction(match[1]) * _FACTORS[match[2].upper()]
        if tokens.denominator == 1:
            return int(tokens)
    raise ConfigError(f"{field}={value!r} is not allowed; allowed: a whole number of tokens such as 131072, 128K or 1M")
