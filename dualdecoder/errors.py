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


def require(allowed_holds: bool, field: str, value: object, allowed: str) -> None:
    """Raise ``ConfigError`` naming ``field`` unless ``allowed_holds``."""
    if not allowed_holds:
        raise ConfigError(f"{field}={value!r} is not allowed; allowed: {allowed}")
