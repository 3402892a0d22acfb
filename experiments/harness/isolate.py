"""Measure in a fresh child process that owns one GPU: nothing of one point leaks into the next, and a child may die."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dualdecoder.errors import ConfigError
from experiments.harness.child import Measure, answer
from experiments.harness.devices import Slot, one_gpu
from experiments.harness.environment import ROOT
from experiments.harness.memory import give_back

CHILD = "experiments.harness.child"
# Lines of a dead child's stderr that are kept: enough for a traceback out of a library.
TAIL_LINES = 40
READ_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """How a measurement ended: its rows, or an error; and the GPU it had, with what was measured on it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    gpu: dict[str, Any] | None = None


def measure_in_child(measure: Measure, config: dict[str, Any]) -> Outcome:
    """Run ``measure(config)``, a function at the top of a source file, in a process of its own."""
    # From its globals: a launcher that pickles functions keeps this of the file they came from, and nothing else.
    file, function = Path(measure.__globals__["__file__"]).resolve(), measure.__qualname__
    assert file.is_file() and function.isidentifier(), measure
    request = {"file": str(file), "function": function, "config": config}
    with _temporary_folder() as folder, one_gpu() as slot:
        path = Path(folder) / "outcome.json"
        code, stderr = _run(path, request, slot)
        found: dict[str, Any] = {"error": _death(code, stderr)}
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
    return _outcome(found, slot)


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="dualdecoder-")
    except OSError as error:
        problem = error.strerror or error
        raise ConfigError(
            f"TMPDIR: no temporary file can be written: {problem}; allowed: a folder with room"
        ) from error


def measure_here(measure: Measure, config: dict[str, Any]) -> Outcome:
    """Run ``measure(config)`` in this process: the points of a sweep then share a loaded model, and no other memory."""
    with one_gpu() as slot:
        # Before the outcome is looked at: whether a point has too little memory must not depend on the one before.
        give_back()
        return _outcome(answer(measure, config), slot)


def _outcome(found: dict[str, Any], slot: Slot) -> Outcome:
    gpu = {**slot.gpu.fields, **(found.get("gpu") or {})} if slot.gpu else None
    return Outcome(found.get("rows", []), found.get("error"), gpu)


def _run(path: Path, request: dict[str, Any], slot: Slot) -> tuple[int, str]:
    """Exit code and the last lines of stderr of one child; an interrupt of this process kills it."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if slot.gpu:
        variables["CUDA_VISIBLE_DEVICES"] = slot.gpu.uuid
    command = [sys.executable, "-m", CHILD, str(path)]
    inherited = () if slot.descriptor is None else (slot.descriptor,)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "errors": "replace"}
    with subprocess.Popen(command, env=variables, pass_fds=inherited, text=True, **pipes) as child:
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        reader = threading.Thread(target=_forward, args=(child.stderr, tail), daemon=True)
        reader.start()
        try:
            _send(child, json.dumps(request) + "\n")
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        # Not for ever: a process that the child has left behind may still hold the pipe.
        reader.join(READ_S)
    return code, "".join(tail)


def _send(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        pass  # it died at once; its exit code says so


def _forward(stream: IO[str], tail: deque[str]) -> None:
    for line in stream:
        sys.stderr.write(line)
        tail.append(line)


def _death(code: int, stderr: str) -> dict[str, Any]:
    """The error of a child that left no outcome."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the system sends it when host memory has run out" if name == "SIGKILL" else ""
        message = f"the measuring process was ended by {name}{hint}"
    else:
        message = f"the measuring process ended by itself with exit status {code}"
    return {"type": "ChildDied", "message": message, "traceback": stderr, "kind": "other", "exit": code}
