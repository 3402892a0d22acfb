"""How many bytes a run takes, before anything is allocated."""

from __future__ import annotations

from importlib.util import find_spec

import psutil
import torch

from dualdecoder.config import MethodConfig, ModelConfig, dtype_from_name
from dualdecoder.errors import CapacityError
from dualdecoder.ledger import MemoryPlan
from dualdecoder.method import method_class
from dualdecoder.model import planned_weight_bytes


def plan_memory(
    model: ModelConfig, method: str, config: MethodConfig, batch: int, context: int, dtype: str | torch.dtype
) -> MemoryPlan:
    """Bytes by category of weights, one step's activations and the method's state for ``batch`` x ``context`` tokens.

    ``activations`` is an upper estimate of a step's transient tensors; everything else is what gets allocated.
    The transient memory of a prefill is not in it. The plan is for a GPU; where Triton is not installed, the kernels'
    workspaces are missing from it.
    """
    dtype = dtype_from_name(dtype)
    device_type = "cuda" if find_spec("triton") else "cpu"
    plan = method_class(method).plan(model, config, batch, context, dtype, device_type)
    weights, activations = planned_weight_bytes(model, dtype), activation_bytes(model, batch, dtype)
    return plan.with_gpu(weights=weights, activations=activations)


def activation_bytes(model: ModelConfig, batch: int, dtype: torch.dtype, rows: int = 2) -> int:
    """Upper estimate of one decode step's transient tensors: residual stream, projections, MLP, fp32 logits."""
    projections = (2 * model.query_heads + 2 * model.kv_heads) * model.head_dim
    per_row = 3 * model.width + projections + 3 * model.mlp_width
    return batch * rows * (per_row * dtype.itemsize + 4 * model.vocabulary)


def check_memory(plan: MemoryPlan, device: torch.device) -> None:
    """Raise ``CapacityError`` with needed and available bytes if a method's ``plan`` does not fit now."""
    on_host = plan.host_total + (plan.gpu_total if device.type == "cpu" else 0)
    _require_free("keys and values", on_host, torch.device("cpu"))
    if device.type == "cuda":
        _require_free("keys and values", plan.gpu_total, device)


def check_weights(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``CapacityError`` with needed and available bytes if the weights do not fit now."""
    _require_free(f"the weights of {model.name}", planned_weight_bytes(model, dtype), device)


def _require_free(what: str, needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        memory, available = "GPU memory", torch.cuda.mem_get_info(device)[0]
    else:
        memory, available = "host memory", psutil.virtual_memory().available
    if needed > available:
        raise CapacityError(f"{memory}: {needed:,} bytes needed for {what}, {available:,} available")
