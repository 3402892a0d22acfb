"""`key=value` arguments of the commands that measure nothing and so need no Hydra folder of their own."""

from collections.abc import Mapping, Sequence


def read_options(arguments: Sequence[str], defaults: Mapping[str, str]) -> dict[str, str]:
    """`defaults` with the given `key=value` arguments put in. Raises ValueError for any other argument."""
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in defaults or not equals or not value:
            allowed = ", ".join(f"{name}=VALUE" for name in defaults)
            raise ValueError(f"argument {argument!r} is not understood; allowed: {allowed}")
        options[key] = value
    return options
