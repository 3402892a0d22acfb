"""One GPU a point: whoever measures holds the GPU's lock file, in whatever process or launcher it runs.

The lock is an open file that the measuring child inherits, so it lasts as long as the child does, also when the process
that started the child is killed, and it cannot be left behind.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from experiments.harness.environment import Gpu, visible_gpus

POLL_S = 0.2


@dataclass(frozen=True)
class Slot:
    """A GPU that is ours, and the descriptor that keeps it so; both None on a machine without a GPU."""

    gpu: Gpu | None = None
    descriptor: int | None = None


@contextmanager
def one_gpu() -> Iterator[Slot]:
    """Wait for a free GPU and hold it. Where there are several kinds, only those of the first one's kind count."""
    gpus = visible_gpus()
    alike = [gpu for gpu in gpus if gpu.fields["name"] == gpus[0].fields["name"]]
    if not alike:
        yield Slot()
        return
    gpu, file = _wait_for_one(alike)
    with file:
        yield Slot(gpu, file.fileno())


def _wait_for_one(gpus: list[Gpu]) -> tuple[Gpu, IO[str]]:
    while True:
        for gpu in gpus:
            if file := _lock(gpu):
                return gpu, file
        time.sleep(POLL_S)


def _lock(gpu: Gpu) -> IO[str] | None:
    import fcntl  # not on every system, but wherever there is CUDA and a GPU is to be shared

    file = (Path(tempfile.gettempdir()) / f"dualdecoder-{gpu.uuid}.lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
