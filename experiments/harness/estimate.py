"""What a point will cost, for a dry run: time from earlier records, memory from the plan."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from dualdecoder.errors import UserError
from experiments.harness.environment import device_tag
from experiments.harness.records import Record, load_records

GIB = 2**30


def estimate(record: Record, folder: Path) -> str:
    """Seconds and GiB in words, "unknown" where nothing is known; or why the point cannot be measured."""
    try:
        planned = planned_bytes(record.config)
    except UserError as error:
        return f"cannot be measured: {error}"
    seconds = _seconds(record, folder)
    time = "time unknown" if seconds is None else f"about {seconds:.0f} s"
    memory = "memory unknown" if planned is None else f"{planned / GIB:.2f} GiB planned"
    return f"{time}, {memory}"


def _seconds(record: Record, folder: Path) -> float | None:
    """The median of the finished points of the same experiment in `folder` on the same kind of device."""
    device, (records, _) = device_tag(record.environment), load_records(folder)
    seconds = [item.seconds for item in records if item.seconds and device_tag(item.environment) == device]
    return median(seconds) if seconds else None


def planned_bytes(config: dict[str, Any]) -> int | None:
    """Device bytes of the largest of the config's methods; None for a config without a model, method or context."""
    tokens, model = config.get("context", config.get("length")), config.get("model")
    methods = list(_methods(config))
    if not methods or not isinstance(tokens, int) or not isinstance(model, dict):
        return None
    return max(_plan(model, method, config.get("batch", 1), tokens) for method in methods)


def _methods(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    one, several = config.get("method"), config.get("methods")
    candidates = [one] if one else several.values() if isinstance(several, dict) else []
    return (method for method in candidates if isinstance(method, dict))


def _plan(model: dict[str, Any], method: dict[str, Any], batch: int, tokens: int) -> int:
    from dualdecoder.checkpoints import shape_of
    from dualdecoder.config import dtype_from_name
    from dualdecoder.method import method_config
    from dualdecoder.planning import plan_memory
    from dualdecoder.shapes import SHAPES

    settings = method_config(method["name"], method.get("options") or {})
    shape, dtype = SHAPES.get(model["shape"]) or shape_of(model["shape"]), dtype_from_name(model["dtype"])
    return plan_memory(shape, method["name"], settings, batch, tokens, dtype).gpu_total
