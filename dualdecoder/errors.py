"""Errors that a user can cause. Each message names the field and says what is allowed."""

from __future__ import annotations


class UserError(ValueError):
    """What a user caused and can mend; commands print it as one line."""


class ConfigError(UserError):
    """A setting is outside what is allowed."""


class CheckpointError(UserError):
    """A checkpoint cannot be read: missing, truncated, of an unsupported kind or architecture."""


class CapacityError(UserError):
    """A request needs more tokens or bytes than there are."""


class ContextError(CapacityError):
    """A request needs more tokens than a model or a method takes: more memory would not help."""


class NotFiniteError(UserError):
    """A model's numbers overflow or are no numbers, in the dtype it runs in."""


def require(allowed_holds: bool, field: str, value: object, allowed: str) -> None:
    """Raise ``ConfigError`` naming ``field`` unless ``allowed_holds``."""
    if not allowed_holds:
        raise ConfigError(f"{field}={shortened(repr(value))} is not allowed; allowed: {allowed}")


def one_line(error: BaseException) -> str:
    """What a foreign exception says, on one line of bounded length."""
    return shortened(" ".join(str(error).split()) or type(error).__name__)


def shortened(text: str, most: int = 300) -> str:
    """``text``, its middle left out beyond ``most`` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"
