"""The console command: ``dualdecoder`` and ``python -m dualdecoder``.

Ctrl-C and a closed pipe end it without a word at any moment: while it imports, works or leaves.
"""

import os
import sys

from dualdecoder.interrupts import ctrl_c_ends

CLOSED_PIPE_STATUS = 128 + 13


def run() -> int:
    """The command's exit status, its output flushed."""
    ctrl_c_ends()
    try:
        status = _status()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        return status
    except BrokenPipeError:
        _drop_output(sys.stdout, sys.stderr)
        return CLOSED_PIPE_STATUS
    except OSError as error:
        _drop_output(sys.stdout)
        print(f"dualdecoder: the output cannot be written: {error}", file=sys.stderr)
        return 2
    finally:
        ctrl_c_ends()


def _status() -> int:
    from dualdecoder.cli import main

    try:
        return main()
    except SystemExit as end:  # argparse ends so, after its help too.
        return end.code if isinstance(end.code, int) else 0


def _drop_output(*streams) -> None:
    # Python flushes them once more on its way out, and would complain.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())


if __name__ == "__main__":
    sys.exit(run())
