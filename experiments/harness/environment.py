"""What a measurement ran on: machine, GPU, versions and code, without names of hosts, users or folders."""

import hashlib
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from dualdecoder.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

_PACKAGES = ("torch", "triton", "transformers", "numpy")
_CODE_FOLDERS = ("dualdecoder", "baselines", "experiments")
# They only read records: a change in them leaves every measurement valid.
_NOT_MEASURING = (
    *(f"experiments/{name}.py" for name in ("__main__", "notebooks", "report", "reproduce", "verify")),
    "experiments/reporting/",
    "experiments/harness/devices.py",
    "experiments/harness/estimate.py",
    "experiments/harness/portable.py",
    "experiments/harness/saving.py",
)
# Recorded key -> nvidia-smi query field (current values: the link of an idle GPU may be slower than its maximum).
_GPU_FIELDS = {
    "name": "name",
    "memory_mib": "memory.total",
    "driver": "driver_version",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "sm_clock_mhz": "clocks.current.sm",
    "memory_clock_mhz": "clocks.current.memory",
    "power_limit_w": "power.limit",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU: the name that CUDA_VISIBLE_DEVICES takes, and what a record says of it."""

    uuid: str
    fields: dict[str, Any]


def environment() -> dict[str, Any]:
    """The present environment as JSON values; what cannot be found out is None. Starts no CUDA context."""
    return {
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        **_cpu(),
        "gpu": [gpu.fields for gpu in visible_gpus()] or None,
        **_commit(),
        "lock": _sha256(ROOT / "requirements.lock"),
        "code": code_hash(),
    }


def device_tag(env: dict[str, Any]) -> str:
    """ "cpu", or the name of the first GPU in an environment."""
    return env["gpu"][0]["name"] if env["gpu"] else "cpu"


@cache
def code_hash(root: Path = ROOT) -> str:
    """SHA-256 over the sources that can change a measurement. Cached: a sweep runs the code that it started with."""
    digest = hashlib.sha256()
    for folder in _CODE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(_NOT_MEASURING):
                digest.update(f"{name}\0{_sha256(path)}\n".encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch  # seconds to import, and this module is also used by the report

    return {
        "cpu": _cpu_model(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "host_ram_bytes": psutil.virtual_memory().total,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def visible_gpus() -> list[Gpu]:
    """The GPUs this process may use; none if there is none or if this PyTorch is a build without CUDA."""
    import torch

    if torch.version.cuda is None:
        return []
    query = ",".join(["index", "uuid", "pci.bus_id", *_GPU_FIELDS.values()])
    output = _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (output or "").splitlines()]
    return [
        Gpu(uuid, {**dict(zip(_GPU_FIELDS, values, strict=True)), "cuda": torch.version.cuda, "numa_node": _numa(bus)})
        for index, uuid, bus, *values in rows
        if _visible(index, uuid)
    ]


def _numa(bus: str) -> str | None:
    """The NUMA node of a PCI device, "-1" where the machine has only one; sysfs writes the domain in four digits."""
    domain, _, rest = bus.lower().partition(":")
    path = Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _visible(index: str, uuid: str) -> bool:
    # nvidia-smi lists every GPU of the machine, whatever CUDA_VISIBLE_DEVICES says.
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or chosen.startswith("MIG"):
        return True
    return any(item == index or (item and uuid.startswith(item)) for item in chosen.replace(" ", "").split(","))


def _commit() -> dict[str, Any]:
    commit = os.environ.get("DUALDECODER_COMMIT") or _git("rev-parse", "HEAD")
    # Records themselves may be tracked: writing one must not make the next one dirty.
    changes = _git("status", "--porcelain", "--", ".", ":!results")
    dirty = bool(changes) if changes is not None else None
    if flag := os.environ.get("DUALDECODER_DIRTY"):
        if flag not in ("0", "1"):
            raise ConfigError(f"DUALDECODER_DIRTY is {flag!r}; allowed: 0, 1")
        dirty = flag == "1"
    return {"commit": commit, "dirty": dirty}


def _git(*arguments: str) -> str | None:
    # The ceiling keeps git from answering for a repository that merely contains a copy of this project.
    return _output(["git", "-C", str(ROOT), *arguments], {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)})


def _output(command: list[str], variables: dict[str, str] | None = None) -> str | None:
    """What `command` prints, stripped; None if it is absent, fails or takes over 20 s."""
    variables = {**os.environ, **(variables or {})}
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
