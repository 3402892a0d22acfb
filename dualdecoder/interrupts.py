"""What Ctrl-C does to the command. Imports next to nothing, so that it can be set before everything else."""

from __future__ import annotations

import signal
import threading


def ctrl_c_ends() -> None:
    """From now on Ctrl-C ends the process on the spot: nothing is to be cleaned up."""
    _set(signal.SIG_DFL)


def ctrl_c_raises() -> None:
    """From now on Ctrl-C raises ``KeyboardInterrupt``, as Python does by itself."""
    _set(signal.default_int_handler)


def _set(handler: object) -> None:
    # Only the main thread may, and who started the command with Ctrl-C ignored (in the background) wants it ignored.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
