"""The user's cache: converted checkpoints and what took long to compute."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``DUALDECODER_CACHE``, else ``dualdecoder`` in ``XDG_CACHE_HOME`` or ``~/.cache``; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DUALDECODER_CACHE") or Path(base) / "dualdecoder")
