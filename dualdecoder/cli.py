"""Complete prompts with sparse KV, or plan the memory that takes."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from dualdecoder.errors import ConfigError, UserError, one_line
from dualdecoder.interrupts import ctrl_c_ends, ctrl_c_raises
from dualdecoder.registry import REGISTRY
from dualdecoder.units import parse_tokens

# What needs torch is imported by the commands: help and version answer at once.


def main(argv: list[str] | None = None) -> int:
    """Run the console command; returns the exit status (2 for a user's error, 130 after Ctrl-C).

    Raises ``BrokenPipeError`` if nobody reads the output any more.
    """
    arguments = _parser().parse_args(argv)
    _make_importable(arguments.method)
    try:
        command = _command(arguments.command)
        command(arguments, _options(arguments.option))
    except BrokenPipeError:
        raise
    except (UserError, OSError) as error:
        print(f"dualdecoder: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _command(name: str) -> Any:
    # An interrupt inside a library's import may come out as any exception. There is nothing to clean up yet.
    ctrl_c_ends()
    from dualdecoder import commands

    ctrl_c_raises()
    return getattr(commands, name)


def _make_importable(method: str) -> None:
    # The console script, unlike ``python -m``, does not look where the user is.
    if ":" in method and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dualdecoder", description=__doc__)
    _add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    generate = commands.add_parser("generate", help="complete a prompt and print the text as it comes")
    _add_generate_options(generate)
    plan = commands.add_parser("plan", help="bytes by category for a named shape; needs no weights")
    plan.add_argument("--model", default="llama-3.1-8b", help="name of a shape; a wrong one lists them")
    plan.add_argument("--context", type=_tokens, default=131072, help="tokens a sequence, such as 131072 or 128K")
    plan.add_argument("--batch", type=_integer, default=1, help="sequences (default %(default)s)")
    _add_common(plan, dtype="bfloat16")
    return parser


def _add_version(parser: argparse.ArgumentParser) -> None:
    try:
        number = version("dualdecoder")
    except PackageNotFoundError:
        number = "(not installed)"
    parser.add_argument("--version", action="version", version=f"dualdecoder {number}")


def _add_common(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument("--method", default="dualdecoder", help=f"{', '.join(REGISTRY)}, or package.module:Class")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a method option, such as budget=1024"
    )
    parser.add_argument("--dtype", default=dtype, help="float32, bfloat16 or float16 (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    _add_version(parser)


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, a hub id, a folder or a GGUF file")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, help="UTF-8 text file with the prompt")
    prompt.add_argument("--prompt", help="the prompt itself")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--max-new-tokens", type=_tokens, default=128, help="such as 500 or 1K (default %(default)s)")
    parser.add_argument("--temperature", type=_number, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=_integer)
    parser.add_argument("--top-p", type=_number)
    parser.add_argument("--seed", type=_integer, default=0)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    _add_common(parser, dtype="float32")


def _tokens(text: str) -> int:
    try:
        return parse_tokens(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _integer(text: str) -> int:
    return _parsed(int, text, "an integer")


def _number(text: str) -> float:
    return _parsed(float, text, "a number")


def _parsed(kind: Any, text: str, allowed: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {allowed}") from error


def _options(pairs: list[str]) -> dict[str, Any]:
    return dict(_option(pair) for pair in pairs)


def _option(pair: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = pair.partition("=")
    try:
        # safe_load turns "256" into a number and leaves words alone; it runs nothing.
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        parsed, equals = None, ""
    if not equals:
        raise ConfigError(f"--option {pair!r} is not allowed; allowed: NAME=VALUE")
    return name, parsed
