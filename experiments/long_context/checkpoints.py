"""What a stopped training goes on from: parameters and AdamW's two moments in three safetensors files of one folder."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import nn

FILES = ("parameters", "exp_avg", "exp_avg_sq")


def save(folder: Path, step: int, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write the state after ``step`` steps. Each file is renamed into its place when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in FILES:
        values = {name: _value(kind, parameter, optimizer) for name, parameter in parameters.items()}
        save_file(values, folder / f"{kind}.tmp", metadata={"step": str(step)})
    for kind in FILES:
        os.replace(folder / f"{kind}.tmp", folder / f"{kind}.safetensors")


def resume(folder: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Load the state in ``folder``; returns the number of steps taken, 0 if there is none or it is not whole."""
    paths = {kind: folder / f"{kind}.safetensors" for kind in FILES}
    if not all(path.is_file() for path in paths.values()):
        return 0
    steps = {_step(path) for path in paths.values()}
    # Stopped between two renames: the files are of different steps, and none of them is of use.
    if len(steps) > 1:
        return 0
    stored = {kind: load_file(path) for kind, path in paths.items()}
    step = steps.pop()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored["parameters"][name])
            moments = {kind: stored[kind][name].to(parameter.device) for kind in FILES[1:]}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step


def _step(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return int((file.metadata() or {}).get("step", 0))


def _value(kind: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    tensor = parameter if kind == "parameters" else optimizer.state[parameter][kind]
    return tensor.detach().to("cpu", torch.float32).contiguous()
