"""What a row of each experiment's tables, and an environment, must hold: the contract of measurement and report."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# Beyond every count of bytes or tokens; what is larger overflows when it is added up or drawn.
MOST = 1e18
MOST_CHARACTERS = 2000
MOST_CATEGORIES = 64
MOST_ROWS = 100_000


@dataclass(frozen=True)
class Kind:
    """A kind of value: the words for an error message and the test."""

    words: str
    accepts: Callable[[Any], bool]
    # Whether a row may lack it: what older records do not have.
    late: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) <= MOST
    )


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_positive(value) and value == int(value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_number(item) for item in value)


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_bytes(value: Any) -> bool:
    few = isinstance(value, dict) and len(value) <= MOST_CATEGORIES
    return few and all(_is_category(name) and _is_number(size) and size >= 0 for name, size in value.items())


def _is_category(name: str) -> bool:
    return len(name) <= 60 and name.isprintable()


def _is_promises(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), bool) for name in ("exact", "recalls"))


def _is_gpus(value: Any) -> bool:
    return value is None or (isinstance(value, list) and bool(value) and all(map(_is_gpu, value)))


def _is_gpu(value: Any) -> bool:
    named = isinstance(value, dict) and _is_text(value.get("name")) and {*_GPU_TEXTS} <= {*value}
    return named and all(value[name] is None or _is_text(value[name]) or _is_number(value[name]) for name in _GPU_TEXTS)


def _optional(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.accepts(value))


def _late(kind: Kind) -> Kind:
    return replace(kind, late=True)


TEXT = Kind(f"a text of at most {MOST_CHARACTERS} characters", _is_text)
NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", _is_positive)
COUNT = Kind("a whole number above 0", _is_count)
NUMBERS = Kind("a list of one or more numbers", _is_numbers)
TIMES = Kind("a list of one or more numbers above 0", lambda value: _is_numbers(value) and min(value) > 0)
INTERVAL = Kind("two numbers [low, high]", lambda value: _is_numbers(value) and len(value) == 2)
FRACTION = Kind("a number from 0 to 1", _is_fraction)
PERCENT = Kind("a number from 0 to 100", lambda value: _is_number(value) and 0 <= value <= 100)
BYTES = Kind("numbers from 0 on by category", _is_bytes)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
CAPABILITIES = Kind("what a method can promise, by name, with exact and recalls", _is_promises)
SCOPE = Kind("all, layer or step", lambda value: value in ("all", "layer", "step"))

# What every row of a speed table says about the work behind it (experiments/harness/attended.py).
_WORK = {"attended_share": _late(_optional(FRACTION)), "attended_share_basis": _late(_optional(TEXT))}
ROW_FIELDS: dict[str, dict[str, Kind]] = {
    "throughput": {
        "model": TEXT,
        "method": TEXT,
        "context": COUNT,
        "batch": COUNT,
        "rows_per_step": NUMBER,
        "device": TEXT,
        "dtype": TEXT,
        "steps": COUNT,
        "step_ms": TIMES,
        "prefill_s": NUMBER,
        "tokens_per_s": POSITIVE,
        "hit_rate": _optional(FRACTION),
        **_WORK,
        "remark": _late(TEXT),
        "urgent_bytes_per_step": NUMBER,
        "prefetched_bytes_per_step": NUMBER,
        "kv_gpu_bytes": NUMBER,
        "host_bytes": NUMBER,
    },
    "residency": {
        "model": TEXT,
        "context": COUNT,
        "method": TEXT,
        "dtype": TEXT,
        "budget": _optional(NUMBER),
        "batch": COUNT,
        "gpu": BYTES,
        "host": BYTES,
        "gpu_total": POSITIVE,
        "host_total": NUMBER,
        "per_sequence_gpu": NUMBER,
        "cap_bytes": POSITIVE,
        "largest_batch": NUMBER,
    },
    "prediction": {
        "prompt": TEXT,
        "speculation": TEXT,
        "scope": SCOPE,
        "layer": _optional(NUMBER),
        "step": _optional(NUMBER),
        "kv_accuracy": FRACTION,
        "reuse": _optional(FRACTION),
        "token_accuracy": _optional(FRACTION),
        "model": TEXT,
        "context": COUNT,
        "budget": NUMBER,
        "steps": COUNT,
    },
    "prediction_cache": {
        **dict.fromkeys(("prompt", "speculation", "model", "cache"), TEXT),
        **dict.fromkeys(("context", "steps"), COUNT),
        **dict.fromkeys(("budget", "capacity", "prefetched"), NUMBER),
        "prefetch": FLAG,
        "misses": FRACTION,
    },
    "ruler": {
        "task": TEXT,
        "length": COUNT,
        "method": TEXT,
        "model": TEXT,
        "budget": _optional(NUMBER),
        # Nothing where the task had no data.
        "score": _optional(PERCENT),
        "scores": _optional(NUMBERS),
        "samples": NUMBER,
        "ci95": _optional(INTERVAL),
        "interval": _late(_optional(TEXT)),
        "attended_tokens": _optional(NUMBER),
    },
    "fidelity": {
        **dict.fromkeys(("model", "method"), TEXT),
        "budget": _optional(COUNT),
        "attended_tokens": _optional(NUMBER),
        **dict.fromkeys(("context", "steps", "texts"), COUNT),
        **dict.fromkeys(("kl_mean", "kl_p99"), NUMBER),
        "top1_agreement": FRACTION,
        "attention_mass": _optional(FRACTION),
    },
    "lm_eval": {
        **dict.fromkeys(("task", "metric", "model", "method"), TEXT),
        "budget": _optional(NUMBER),
        "value": NUMBER,
        "stderr": _optional(NUMBER),
        "samples": NUMBER,
    },
    "step_time": {
        **dict.fromkeys(("variant", "model", "selection", "host_kv"), TEXT),
        **dict.fromkeys(("context", "batch"), COUNT),
        **dict.fromkeys(("budget", "median_ms", "tokens_per_s"), NUMBER),
        **dict.fromkeys(("link_floor_ms", "hbm_floor_ms", "exposed_ms", "overlap_efficiency"), NUMBER),
        **dict.fromkeys(("copy_rate", "link_rate", "gather_rate", "allocated_bytes", "ledger_bytes"), NUMBER),
        "step_ms": TIMES,
        "hit_rate": FRACTION,
        **_WORK,
        "gpu": BYTES,
    },
    "method_time": {
        **dict.fromkeys(("model", "dtype", "method", "outcome"), TEXT),
        **dict.fromkeys(("context", "batch"), COUNT),
        # Empty where a method did not fit into memory, and `problem` is not.
        **dict.fromkeys(("problem", "selection", "host_kv", "link_rate_of"), _optional(TEXT)),
        **dict.fromkeys(("rows_per_step", "attended_tokens", "budget", "median_ms", "tokens_per_s"), _optional(NUMBER)),
        **dict.fromkeys(("compute_ms", "link_bytes", "urgent_bytes", "prefetched_bytes"), _optional(NUMBER)),
        **dict.fromkeys(("hbm_bytes", "copy_rate", "link_rate", "hbm_floor_ms", "link_floor_ms"), _optional(NUMBER)),
        "efficiency": _optional(NUMBER),
        **_WORK,
        "remark": _late(_optional(TEXT)),
        "graph": _optional(FLAG),
        "hit_rate": _optional(FRACTION),
        "step_ms": _optional(TIMES),
        "capabilities": _optional(CAPABILITIES),
        **dict.fromkeys(("gpu", "host"), _optional(BYTES)),
    },
    "attention_time": {
        **dict.fromkeys(("model", "dtype", "variant"), TEXT),
        **dict.fromkeys(("context", "batch"), COUNT),
        **dict.fromkeys(("us", "bytes", "gb_s", "share_of_copy", "copy_rate", "error"), NUMBER),
    },
    "kernel_time": {
        **dict.fromkeys(("kernel", "variant"), TEXT),
        **dict.fromkeys(("batch", "gb_s"), NUMBER),
        **dict.fromkeys(("ms", "times_floor"), _late(NUMBER)),
    },
    "prefill_time": {
        "model": TEXT,
        **dict.fromkeys(("tokens", "seconds", "tokens_per_s", "weight_bytes", "method_bytes", "peak_bytes"), NUMBER),
    },
}

LATER_FIELDS: dict[str, dict[str, Kind]] = {"ruler": {"prompts": TEXT, "differs": TEXT}}
"""Fields that rows of older records do not have."""


def table_of(experiment: str, row: dict[str, Any]) -> str:
    """The table that a row of an experiment belongs to: its own, or that of its kind of row."""
    return f"{experiment}_cache" if row.get("scope") == "cache" else experiment


ENVIRONMENT_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("platform", "python", "launcher", "code", "cpu"), TEXT),
    **dict.fromkeys(("torch", "triton", "transformers", "numpy", "commit", "lock"), _optional(TEXT)),
    **dict.fromkeys(("logical_cores", "torch_threads", "host_ram_bytes"), NUMBER),
    "physical_cores": _optional(NUMBER),
    "dirty": Kind("true, false or null", lambda value: value in (True, False, None)),
    "gpu": Kind("a list of one or more GPUs, or null", _is_gpus),
    "weights": _late(_optional(TEXT)),
    "method_sources": _late(Kind("digests by name of method", lambda value: isinstance(value, dict))),
}
_MESSAGE = Kind("a text", lambda value: isinstance(value, str))
_GPU_TEXTS = ("name", "memory_mib", "driver", "cuda", "pcie_generation", "pcie_width")


def environment_problem(environment: dict[str, Any]) -> tuple[str, str] | None:
    """The first fault in an environment as (field, problem), or None."""
    return _problem("environment", environment, ENVIRONMENT_FIELDS)


def error_problem(error: dict[str, Any] | None) -> tuple[str, str] | None:
    """The first fault in what a record says of its failure as (field, problem), or None."""
    return _problem("error", error or {}, dict.fromkeys(("type", "message"), _late(_MESSAGE)))


def row_problem(experiment: str, rows: list[Any]) -> tuple[str, str] | None:
    """The first fault in `rows` as (field, problem), or None; a table not listed above may hold any rows."""
    if len(rows) > MOST_ROWS:
        return "rows", f"has {len(rows)} items; allowed: {MOST_ROWS}"
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            return f"rows[{index}]", "must be an object"
        later = {name: kind for name, kind in LATER_FIELDS.get(experiment, {}).items() if name in row}
        if problem := _problem(f"rows[{index}]", row, ROW_FIELDS.get(table_of(experiment, row), {}) | later):
            return problem
    return None


def _problem(where: str, values: dict[str, Any], kinds: dict[str, Kind]) -> tuple[str, str] | None:
    for name, kind in kinds.items():
        if name not in values and kind.late:
            continue
        if name not in values:
            return f"{where}.{name}", f"is missing; it must be {kind.words}"
        if not kind.accepts(values[name]):
            return f"{where}.{name}", f"is {values[name]!r:.60}; it must be {kind.words}"
    return None
