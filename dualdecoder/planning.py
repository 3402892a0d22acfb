"""How many bytes a run takes, before anything is allocated."""

from __future__ import annotations

import psutil
import torch

from dualdecoder.config import MethodConfig, ModelConfig
from dualdecoder.errors import CapacityError
from dualdecoder.ledger import MemoryPlan
from dualdecoder.method import method_class
from dualdecoder.model import planned_weight_bytes


def plan_memory(
    model: ModelConfig, method: str, config: MethodConfig, batch: int, context: int, dtype: torch.dtype
) -> MemoryPlan:
    """Bytes by category of weights, one step's activations and the method's state for ``batch`` x ``context`` tokens.

    ``activations`` is an upper estimate of a step's transient tensors; everything else is what gets allocated.
    The transient memory of a prefill is not in it.
    """
    plan = method_class(method).plan(model, config, batch, context, dtype)
    weights, activations = planned_weight_bytes(model, dtype), activation_bytes(model, batch, dtype)
    return plan.with_gpu(weights=weights, activations=activations)


def activation_bytes(model: ModelConfig, batch: int, dtype: torch.dtype, rows: int = 2) -> int:
    """Upper estimate of one decode step's transient tensors: residual stream, projections, MLP, fp32 logits."""
    projections = (2 * model.query_heads + 2 * model.kv_heads) * model.head_dim
    per_row = 3 * model.width + projections + 3 * model.mlp_width
    return batch * rows * (per_row * dtype.itemsize + 4 * model.vocabulary)


def check_memory(plan: MemoryPlan, device: torch.device) -> None:
    """Raise ``CapacityError`` with needed and available bytes if ``plan`` does not fit now."""
    host = plan.host_total + (plan.gpu_total if device.type == "cpu" else 0)
    available = psutil.virtual_memory().available
    if host > available:
        raise CapacityError(f"host memory: {host:,} bytes needed for keys and values, {available:,} available")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if plan.gpu_total > free:
            raise CapacityError(f"GPU memory: {plan.gpu_total:,} bytes needed for keys and values, {free:,} available")
