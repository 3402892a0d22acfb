"""What a config names and does not hold: the content of checkpoints, and the source of methods from elsewhere."""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from dualdecoder.checkpoints import RANDOM_PREFIX, weights_id
from dualdecoder.method import REGISTRY, method_class
from experiments.harness.environment import ROOT

# Already in the hash of the code.
_OWN_FOLDERS = tuple(ROOT / name for name in ("dualdecoder", "baselines", "experiments"))


def checkpoint_content(config: dict[str, Any]) -> str | None:
    """`weights_id` of the config's model; None for one with random weights, and for a config without a model.

    Raises CheckpointError or ConfigError as `weights_id` does.
    """
    model = config.get("model")
    source = model.get("source") if isinstance(model, dict) else None
    return weights_id(source) if isinstance(source, str) and not source.startswith(RANDOM_PREFIX) else None


def method_sources(config: dict[str, Any]) -> dict[str, str]:
    """For each method that is named by a dotted path, SHA-256 over the sources it is made of.

    Those are the file of its class and, one through the other, the files that these import, without installed
    packages (but for the method's own) and without this repository's.
    Raises ConfigError for a method that cannot be imported.
    """
    return {name: _digest(name) for name in sorted(_names(config)) if ":" in name and name not in REGISTRY}


def _names(config: dict[str, Any]) -> Iterator[str]:
    methods = config.get("methods")
    for method in (config.get("method"), *(methods.values() if isinstance(methods, dict) else ())):
        name = method.get("name") if isinstance(method, dict) else method
        if isinstance(name, str):
            yield name


def _digest(name: str) -> str:
    first = method_class(name).__module__
    found: dict[str, Path] = {}
    _collect(first, first.partition(".")[0], found)
    digest = hashlib.sha256()
    for module, path in sorted(found.items()):
        digest.update(f"{module}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _collect(module: str, package: str, found: dict[str, Path]) -> None:
    """Put the file of a module into `found`, and those of what it imports, at its head or inside a function."""
    spec = _spec(module)
    path = Path(spec.origin).resolve() if spec and spec.origin else None
    if module in found or path is None or not _counts(module, path, package):
        return
    found[module] = path
    for other in _imported(path, module if spec and spec.submodule_search_locations else module.rpartition(".")[0]):
        _collect(other, package, found)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None


def _imported(path: Path, package: str) -> Iterator[str]:
    """Names of modules that a source file imports; of ``from a import b`` both a and a.b, one of which may be none."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        # Of a module that is imported later, or never.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            with suppress(ImportError):  # more dots than packages
                base = resolve_name(base, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _counts(module: str, path: Path, package: str) -> bool:
    if path.suffix != ".py" or not path.is_file() or any(path.is_relative_to(folder) for folder in _OWN_FOLDERS):
        return False
    installed = any(path.is_relative_to(Path(sysconfig.get_path(kind)).resolve()) for kind in _INSTALLED)
    return not installed or module.partition(".")[0] == package


_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
