"""The user's cache: converted checkpoints and what took long to compute."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

# What the operating system answers where there is no place, or no permission, to write.
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


def is_unwritable(error: BaseException) -> bool:
    """Whether ``error`` says that something could not be written; libraries in Rust say the number in their text."""
    said = re.search(r"os error (\d+)", str(error))
    number = int(said[1]) if said else getattr(error, "errno", None)
    return number in UNWRITABLE


def cache_folder() -> Path:
    """``DUALDECODER_CACHE``, else ``dualdecoder`` in ``XDG_CACHE_HOME`` or ``~/.cache``; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DUALDECODER_CACHE") or Path(base) / "dualdecoder")
