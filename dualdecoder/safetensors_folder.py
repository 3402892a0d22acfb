"""Tensors of a safetensors folder, one file or sharded: names, shapes and types are known before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dualdecoder.config_file import read_object
from dualdecoder.decoder_weights import HARMLESS
from dualdecoder.errors import CheckpointError, one_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


class SafetensorsFolder:
    """What a folder stores under which name. Raises ``CheckpointError`` if index and files disagree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = weight_files(folder)
        self._open_files = {file: self._open(file) for file in self.files}
        self._file_of: dict[str, str] = {}
        for file, opened in self._open_files.items():
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                self._add(name, file)
        self._check_index()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape; raises ``CheckpointError`` for numbers that are not float32, float16 or bfloat16."""
        stored = self._open_files[self._file_of[name]].get_slice(name)
        if stored.get_dtype() not in DTYPES:
            kind = stored.get_dtype()
            raise CheckpointError(
                f"{self.folder.name}: weight {name!r} is of type {kind}; allowed: {', '.join(DTYPES)}"
            )
        return tuple(stored.get_shape())

    def get(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU."""
        file = self._file_of[name]
        try:
            return self._open_files[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder.name}/{file}: weight {name!r}: {one_line(error)}") from error

    def _add(self, name: str, file: str) -> None:
        other = self._file_of.setdefault(name, file)
        if other != file:
            raise CheckpointError(f"{self.folder.name}: weight {name!r} is stored twice, in {other} and in {file}")

    def _check_index(self) -> None:
        if self.files == [SINGLE]:
            return
        named = _weight_map(self.folder / INDEX)
        for name in sorted(named.keys() ^ self._file_of.keys()):
            if HARMLESS.fullmatch(name):
                continue
            place = f"missing in {named[name]}, where the index has it" if name in named else "missing in the index"
            raise CheckpointError(f"{self.folder.name}: weight {name!r} is {place}")

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except FileNotFoundError as error:
            found = ", ".join(sorted(p.name for p in self.folder.iterdir())[:8]) or "nothing"
            message = f"{self.folder.name}: {file} is missing (only safetensors are read); found: {found}"
            raise CheckpointError(message) from error
        except (SafetensorError, OSError) as error:
            message = f"{self.folder.name}/{file} is truncated or not safetensors: {one_line(error)}"
            raise CheckpointError(message) from error


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files in ``folder``: those of the index, or ``model.safetensors``.

    Raises ``CheckpointError`` if both are there and disagree: which one is meant, nobody can know.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    files = sorted(set(_weight_map(folder / INDEX).values()))
    if SINGLE not in files and (folder / SINGLE).exists():
        raise CheckpointError(
            f"{folder.name}: {SINGLE} is there, and {INDEX} names others; remove what does not belong"
        )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    files = read_object(index).get("weight_map")
    where = f"{index.parent.name}/{index.name}"
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{where} is not a readable index: weight_map must name a file for each weight")
    # Only names beside the index: a path could lead anywhere.
    if not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
        raise CheckpointError(f"{where}: weight_map must name files in the same folder")
    return files
