"""Low-rank adapters (LoRA, arXiv 2106.09685) on the attention projections of a transformers model, and their file.

Suffixes: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class AdaptedLinear(nn.Module):
    """A frozen linear layer plus ``scale * up_OR @ down_RI``; ``up_OR`` starts at zero, so it starts unchanged."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        device = base.weight.device
        self.down_RI = nn.Parameter(torch.randn(rank, base.in_features, device=device) * base.in_features**-0.5)
        self.up_OR = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x_TI: Tensor) -> Tensor:
        low_TR = x_TI @ self.down_RI.to(x_TI.dtype).T
        return self.base(x_TI) + (low_TR @ self.up_OR.to(x_TI.dtype).T) * self.scale


def adapt(model: nn.Module, rank: int, scale: float) -> dict[str, nn.Parameter]:
    """Freeze ``model`` and put adapters on its attention projections; returns what is to be trained, by name."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in PROJECTIONS and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), last, AdaptedLinear(module, rank, scale))
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_adapter(parameters: dict[str, nn.Parameter], path: Path, settings: dict[str, str]) -> None:
    """Write the adapter in bfloat16; ``settings`` (rank, scale, RoPE base, ...) become the file's metadata."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in parameters.items()}
    save_file(tensors, path, metadata={"format": "pt", **settings})


def load_into(parameters: dict[str, nn.Parameter], path: Path) -> None:
    """Copy a file's values into an adapted model's parameters of the same names."""
    stored = load_file(path)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
