"""What holds for every command of this package from its first moment: quick help, and quiet ends.

Imports nothing but the standard library: the help must not wait for torch.
"""

import ast
import os
import select
import signal
import sys
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "experiments"
# As a shell reports a process that a closed pipe has ended.
CLOSED_PIPE = 128 + 13


def begin(command_line: list[str], arguments: list[str]) -> None:
    """Prepare this process for ``python -m experiments`` or ``python -m experiments.NAME``; any other is left alone."""
    name = _module(command_line)
    if name is None:
        return
    _end_quietly()
    if "--version" in arguments:
        print(f"dualdecoder {version()}")
        sys.exit(0)
    if name and {"-h", "--help"} & {*arguments}:
        print(help_of(name))
        sys.exit(0)


def version() -> str:
    """The version of the installed package, or of the sources."""
    try:
        return metadata.version("dualdecoder")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def help_of(name: str) -> str:
    """What a command says of itself, and the settings of an experiment as its config explains them."""
    source = (ROOT / PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    words = ast.get_docstring(ast.parse(source)) or ""
    config = ROOT / "conf" / f"{name}.yaml"
    if "hydra.main" not in source or not config.is_file():
        return words
    settings = [f"Settings (key=value; several values with -m): conf/{name}.yaml", config.read_text(encoding="utf-8")]
    return "\n\n".join([words, *settings, f"What every experiment has: conf/base.yaml\n\n{_text('base')}"])


def _text(name: str) -> str:
    return (ROOT / "conf" / f"{name}.yaml").read_text(encoding="utf-8").partition("\nhydra:")[0].strip()


def _module(command_line: list[str]) -> str | None:
    """NAME of ``-m experiments.NAME``, "" for the package itself, None for any other module."""
    if "-m" not in command_line[:-1]:
        return None
    package, _, name = command_line[command_line.index("-m") + 1].partition(".")
    known = package == PACKAGE and (not name or (ROOT / PACKAGE / f"{name}.py").is_file())
    return name if known else None


def _end_quietly() -> None:
    """Ctrl-C and a closed pipe end the process without a traceback, at any moment."""
    sys.excepthook = _report
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, _leave_if_nobody_reads)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _leave_if_nobody_reads(number: int, frame: FrameType | None) -> None:
    # The pipe to a measuring process may break too, which says only that this one has ended.
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    if any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0)):
        os._exit(CLOSED_PIPE)
