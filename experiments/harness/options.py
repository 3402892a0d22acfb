"""`key=value` arguments of the commands that measure nothing and so need no Hydra folder of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.harness.environment import ROOT


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


def existing_folder(field: str, given: str) -> Path:
    """A folder relative to the root of the repository, or absolute. Raises ValueError if there is none."""
    folder = ROOT / given
    if not folder.is_dir():
        raise ValueError(f"{field}={given!r} is not allowed; allowed: a folder that exists")
    return folder


def one_line(error: Exception) -> str:
    """What an error says, in one line; libraries break theirs into several."""
    return " ".join(str(error).split())
