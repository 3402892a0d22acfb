"""The ``dualdecoder`` command: ``generate`` text, or ``plan`` memory."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import yaml

from dualdecoder.checkpoints import RANDOM_PREFIX, named_shape
from dualdecoder.config import SamplingConfig, dtype_from_name
from dualdecoder.engine import Engine, RunStatistics
from dualdecoder.errors import ConfigError, UserError
from dualdecoder.ledger import MemoryPlan
from dualdecoder.method import REGISTRY, method_config
from dualdecoder.planning import plan_memory
from dualdecoder.shapes import SHAPES


def main(argv: list[str] | None = None) -> int:
    """Entry of the console command; returns the exit status (2 for a user's error)."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (UserError, OSError) as error:
        print(f"dualdecoder: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dualdecoder", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="complete a prompt and print the text as it comes")
    generate.set_defaults(run=_generate)
    _add_generate_options(generate)
    plan = commands.add_parser("plan", help="bytes by category for a named shape; needs no weights")
    plan.set_defaults(run=_plan)
    plan.add_argument("--model", default="llama-3.1-8b", help=f"shape: {', '.join(SHAPES)}")
    plan.add_argument("--context", type=int, default=131072, help="tokens a sequence (default %(default)s)")
    plan.add_argument("--batch", type=int, default=1, help="sequences (default %(default)s)")
    _add_common(plan, dtype="bfloat16")
    return parser


def _add_common(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument("--method", default="dualdecoder", help=f"{', '.join(REGISTRY)}, or package.module:Class")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a method option, such as budget=1024"
    )
    parser.add_argument("--dtype", default=dtype, help="float32, bfloat16 or float16 (default %(default)s)")


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, a hub id, a folder or a GGUF file")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, help="text file with the prompt")
    prompt.add_argument("--prompt", help="the prompt itself")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    _add_common(parser, dtype="float32")


def _options(pairs: list[str]) -> dict[str, Any]:
    return dict(_option(pair) for pair in pairs)


def _option(pair: str) -> tuple[str, Any]:
    name, equals, value = pair.partition("=")
    try:
        # safe_load turns "256" into a number and leaves words alone; it runs nothing.
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed, equals = None, ""
    if not equals:
        raise ConfigError(f"--option {pair!r} is not allowed; allowed: NAME=VALUE")
    return name, parsed


def _generate(a: argparse.Namespace) -> None:
    prompt = a.prompt if a.prompt is not None else a.prompt_file.read_text(encoding="utf-8")
    sampling = SamplingConfig(a.temperature, a.top_k, a.top_p, a.seed)
    engine = Engine.from_pretrained(a.model, method=a.method, dtype=a.dtype, device=a.device, **_options(a.option))
    for event in engine.stream([engine.chat(prompt) if a.chat else prompt], a.max_new_tokens, sampling):
        print(event.text, end="", flush=True)
    print("\n")
    _print_statistics(engine.statistics, a.device)


def _print_statistics(s: RunStatistics, device: str) -> None:
    print(f"device: {device}; prompt: {s.prompt_tokens} tokens, prefill {s.prefill_s:.2f} s")
    decoded = s.new_tokens - s.prompts
    print(f"decode: {decoded} tokens after the first in {s.decode_s:.2f} s, {s.tokens_per_s:.2f} tokens/s")
    for name in ("hit_rate", "kv_accuracy", "reuse"):
        if name in s.method:
            share = s.method[name]
            print(f"{name}: {'nothing was selected' if math.isnan(share) else f'{share:.1%}'}")
    for name in ("urgent_bytes", "prefetched_bytes"):
        if name in s.method:
            print(f"{name}: {s.method[name]:,}")
    _print_plan(s.memory)


def _plan(a: argparse.Namespace) -> None:
    config = method_config(a.method, _options(a.option))
    shape = named_shape(a.model.removeprefix(RANDOM_PREFIX))
    _print_plan(plan_memory(shape, a.method, config, a.batch, a.context, dtype_from_name(a.dtype)))


def _print_plan(plan: MemoryPlan) -> None:
    for place, categories, total in (("device", plan.gpu, plan.gpu_total), ("host", plan.host, plan.host_total)):
        for name, size in categories.items():
            print(f"{place:6} {name:12} {size:>20,} bytes")
        print(f"{place:6} {'total':12} {total:>20,} bytes ({total / 2**30:.2f} GiB)")
