"""What the console command does: ``generate`` and ``plan``, as text or as one JSON document."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from dualdecoder.checkpoints import RANDOM_PREFIX, named_shape
from dualdecoder.completions import RunStatistics, TokenEvent
from dualdecoder.config import SamplingConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError
from dualdecoder.ledger import MemoryPlan
from dualdecoder.method import method_config
from dualdecoder.planning import plan_memory
from dualdecoder.reading_bar import reading_bar


def generate(a: argparse.Namespace, options: dict[str, Any]) -> None:
    """Complete the prompt: its text on stdout as it comes, statistics on stderr; or all of it as JSON on stdout."""
    prompt = a.prompt if a.prompt is not None else read_prompt(a.prompt_file)
    sampling = SamplingConfig(a.temperature, a.top_k, a.top_p, a.seed)
    engine = Engine.from_pretrained(a.model, method=a.method, dtype=a.dtype, device=a.device, **options)
    encoded = engine.chat(prompt) if a.chat else prompt
    with reading_bar(sys.stderr) as on_layer:
        events = engine.stream([encoded], a.max_new_tokens, sampling, on_layer)
        if a.json:
            _print_json(_completion(engine, list(events)) | statistics_entries(engine.statistics, a.device))
            return
        _print_text(events)
    print_statistics(engine.statistics, a.device)


def plan(a: argparse.Namespace, options: dict[str, Any]) -> None:
    """Print the bytes by category."""
    config, shape = method_config(a.method, options), named_shape(a.model.removeprefix(RANDOM_PREFIX))
    planned = plan_memory(shape, a.method, config, a.batch, a.context, a.dtype)
    if a.json:
        _print_json(plan_entries(planned))
    else:
        print_plan(planned, sys.stdout)


def read_prompt(path: Path) -> str:
    """The text of a prompt file. Raises ``ConfigError`` if it is not UTF-8, ``OSError`` if it cannot be read."""
    try:
        # A byte order mark is no part of the prompt.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"byte {error.object[error.start]:#04x} at {error.start} is not UTF-8"
        raise ConfigError(f"--prompt-file {path}: {what}; allowed: UTF-8 text") from error


def _print_text(events: Iterator[TokenEvent]) -> None:
    for event in events:
        print(event.text, end="", flush=True)
    print()


def _completion(engine: Engine, events: list[TokenEvent]) -> dict[str, Any]:
    tokens = [event.token_id for event in events]
    return {"text": engine.text(tokens), "token_ids": tokens, "finish_reason": events[-1].finish_reason}


def statistics_entries(s: RunStatistics, device: str) -> dict[str, Any]:
    """Statistics under names with their units; None where there is no number."""
    figures = {"tokens_per_s": s.tokens_per_s, **s.method}
    return {
        "device": device,
        "prompt_tokens": s.prompt_tokens,
        "new_tokens": s.new_tokens,
        "prefill_s": s.prefill_s,
        "decode_s": s.decode_s,
        **{name: figure if math.isfinite(figure) else None for name, figure in figures.items()},
        "memory_bytes": plan_entries(s.memory),
    }


def plan_entries(plan: MemoryPlan) -> dict[str, Any]:
    """Bytes by place and category, and their totals."""
    return {"device": plan.gpu, "device_total": plan.gpu_total, "host": plan.host, "host_total": plan.host_total}


def _print_json(entries: dict[str, Any]) -> None:
    print(json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False))


def print_statistics(s: RunStatistics, device: str) -> None:
    """Statistics for people, on stderr."""

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    say(f"device: {device}; prompt: {s.prompt_tokens} tokens, prefill {s.prefill_s:.2f} s")
    decoded = s.new_tokens - s.prompts
    say(f"decode: {decoded} tokens after the first in {s.decode_s:.2f} s, {s.tokens_per_s:.2f} tokens/s")
    for name in ("hit_rate", "kv_accuracy", "reuse"):
        if name in s.method:
            share = s.method[name]
            say(f"{name}: {'nothing was selected' if math.isnan(share) else f'{share:.1%}'}")
    for name in ("urgent_bytes", "prefetched_bytes"):
        if name in s.method:
            say(f"{name}: {s.method[name]:,}")
    print_plan(s.memory, sys.stderr)


def print_plan(plan: MemoryPlan, to: TextIO) -> None:
    """Bytes by category, for people."""
    for place, categories, total in (("device", plan.gpu, plan.gpu_total), ("host", plan.host, plan.host_total)):
        for name, size in categories.items():
            print(f"{place:6} {name:12} {size:>20,} bytes", file=to)
        print(f"{place:6} {'total':12} {total:>20,} bytes ({total / 2**30:.2f} GiB)", file=to)
