"""The process that measures one point: python -m experiments.harness.child OUTCOME.json, with the request on stdin.

The request is one line of JSON: the source file and the name of the measuring function, and the point's config. The
outcome goes to a file, because both output streams belong to the measurement. Stdin stays open for as long as the
parent lives: at its end this process ends too, so that a killed sweep leaves nothing behind on a GPU.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dualdecoder.errors import CapacityError, ContextError, UserError

Measure = Callable[[DictConfig], list[dict[str, Any]]]
ORPHANED = 3


def main(outcome: Path) -> None:
    """Measure what stdin asks for; the outcome holds `rows` and `gpu`, or `error`."""
    # Ctrl-C in a terminal reaches both processes; the parent decides, and kills this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def measure(cfg: DictConfig) -> list[dict[str, Any]]:
        return load_measure(Path(request["file"]), request["function"])(cfg)

    text = json.dumps(answer(measure, request["config"]))
    partial = outcome.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(outcome)
    except OSError as error:
        # What was measured is not lost with a folder for temporary files that has become full.
        print(text, flush=True)
        sys.exit(f"{outcome.parent} cannot be written: {error.strerror}; the outcome is printed above")


def answer(measure: Measure, config: dict[str, Any]) -> dict[str, Any]:
    """`rows` and `gpu`, or `error`."""
    try:
        return {"rows": measure(OmegaConf.create(config)), "gpu": _gpu_after()}
    except Exception as error:
        return {"error": describe(error)}


def load_measure(file: Path, function: str) -> Measure:
    """The function of that name in a source file: of a module of this repository, or of any other script."""
    spec = importlib.util.spec_from_file_location("measured", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return getattr(module, function)


def describe(error: Exception) -> dict[str, Any]:
    """An exception as JSON values. Of `kind`: a user's error, too little memory, or any other."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "kind": "memory" if _is_memory(error) else "user" if isinstance(error, UserError) else "other",
    }


def _is_memory(error: Exception) -> bool:
    # By name: without torch imported, the error cannot be torch's.
    if isinstance(error, ContextError):
        return False
    return isinstance(error, CapacityError | MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _gpu_after() -> dict[str, Any] | None:
    """What can only be measured on the GPU itself, after a measurement that used it; None if none did."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    from experiments.harness.gpu import gpu_after_measuring

    return gpu_after_measuring()


def _end_with_parent() -> None:
    # Not through sys.stdin: its lock, held by a waiting thread, would stop the interpreter from ending.
    os.read(0, 1)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
