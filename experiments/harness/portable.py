"""Texts for records: without the folders of this machine that name a user or a checkout."""

import re
from pathlib import Path
from typing import Any

from experiments.harness.environment import ROOT


def portable(text: str) -> str:
    """`text` with the repository as `.` and the home folder as `~`."""
    # The guards on both sides leave longer names alone: /root is not the start of /rootfs, nor the end of /mnt/root.
    for folder, name in ((str(ROOT), "."), (str(Path.home()), "~")):
        if folder != "/":
            text = re.sub(rf"(?<![\w.-]){re.escape(folder)}(?![\w.-])", name, text)
    return text


# A library's message may hold a whole file.
MOST_MESSAGE = 1500


def portable_error(error: dict[str, Any]) -> dict[str, Any]:
    """An error's fields with portable texts, a bounded message, and the files of its traceback by short names."""
    texts = {key: portable(_short_paths(value)) if isinstance(value, str) else value for key, value in error.items()}
    message = texts.get("message", "")
    return {**texts, "message": message if len(message) <= MOST_MESSAGE else message[:MOST_MESSAGE] + " ..."}


def one_line(error: Exception | str) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())


def _short_paths(text: str) -> str:
    return re.sub(r'File "(/[^"]+)"', lambda match: f'File "{_short_path(match[1])}"', text)


def _short_path(path: str) -> str:
    """Relative to the repository, or from the installed package on, or the file's name alone."""
    if "/site-packages/" not in path and Path(path).is_relative_to(ROOT):
        return Path(path).relative_to(ROOT).as_posix()
    found = re.search(r"/(?:site-packages|lib/python3\.\d+)/(.+)", path)
    return found[1] if found else Path(path).name
