"""Devices by name or as torch's objects, checked before anything is loaded."""

from __future__ import annotations

import torch

from dualdecoder.errors import require

KINDS = ("cpu", "cuda")


def checked_device(device: str | torch.device, kinds: tuple[str, ...] = KINDS, who: str = "") -> torch.device:
    """The device ``device``, which must be of ``kinds`` and there. Raises ``ConfigError`` listing what can be used.

    ``who``: whose the kinds are, for the message.
    """
    usable = [name for name in _present() if name.partition(":")[0] in kinds]
    found = _parsed(device)
    good = found is not None and (found.type if found.index is None else str(found)) in usable
    whose = f"{who}, this machine" if who else "this machine"
    require(good, "device", device if isinstance(device, str) else str(device), f"{', '.join(usable)} ({whose})")
    return torch.device(device)


def _parsed(device: object) -> torch.device | None:
    try:
        found = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        return None
    # There is one CPU, whatever its number.
    return torch.device("cpu") if found == torch.device("cpu", 0) else found


def _present() -> list[str]:
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(["cuda"] if cards else []), *(f"cuda:{card}" for card in range(cards))]
