"""The texts that samples are made of, beside random words and numbers: essays, questions with documents."""

import hashlib
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dualdecoder.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB = "hub:"


class NoData(ConfigError):
    """A task whose data set was not given."""


@dataclass(frozen=True)
class DataFiles:
    """Where the texts come from: a path, `hub:OWNER/NAME/FILE` (a Hugging Face data set, over the network), or empty.

    Attributes:
        essays: plain text for the essay haystack.  Empty: Python's own manual (`pydoc_data.topics`, PSF licence, 65,000
            words of technical English) and not the essays that RULER uses, which are copyrighted.
        squad: SQuAD in its JSON form (RULER uses dev-v2.0).  Empty: `qa_1` has no data.
        hotpot: HotpotQA in its JSON form (RULER uses dev distractor v1).  Empty: `qa_2` has no data.
    """

    essays: str = ""
    squad: str = ""
    hotpot: str = ""

    def digests(self) -> dict[str, str]:
        """SHA-256 of each text; empty where there is none. Python's manual differs from version to version too."""
        return {
            "essays": _digest("essays", self.essays) if self.essays else _manual_digest(),
            **{name: _digest(name, source) if source else "" for name, source in self._questions().items()},
        }

    def _questions(self) -> dict[str, str]:
        return {"squad": self.squad, "hotpot": self.hotpot}


@dataclass(frozen=True)
class Material:
    """What a generator draws on.  `count` gives the number of tokens of a text, special tokens not counted."""

    count: Callable[[str], int]
    files: DataFiles = field(default_factory=DataFiles)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", files: DataFiles | None = None) -> "Material":
        """Material whose tokens are those of `tokenizer`."""

        def count(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        return cls(count, files or DataFiles())

    def essay_words(self, words: int) -> list[str]:
        """The first `words` words of the essays, which start again at their end."""
        text = _words(self.files.essays)
        return [*text * (words // len(text)), *text[: words % len(text)]]


@cache
def _words(source: str) -> tuple[str, ...]:
    text = local_file("essays", source).read_text(encoding="utf-8") if source else _manual()
    words = tuple(text.split())
    if not words:
        raise ConfigError(f"data.essays={source!r} holds no words; allowed: a file of plain text")
    return words


def _manual() -> str:
    """Python's manual as prose: without the rows of signs that underline its headings."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return re.sub(r"[*=\-~^\"]{4,}", " ", "\n\n".join(topics[name] for name in sorted(topics)))


def local_file(name: str, source: str) -> Path:
    """The file that `source` means; one on the hub is downloaded.  Raises ConfigError naming `data.<name>`."""
    path = _from_hub(name, source) if source.startswith(HUB) else Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.{name}={source!r} is not a file; allowed: a path, or {HUB}OWNER/NAME/FILE")
    return path


def _from_hub(name: str, source: str) -> Path:
    from huggingface_hub import hf_hub_download

    parts = source.removeprefix(HUB).split("/", 2)
    if len(parts) < 3:
        raise ConfigError(f"data.{name}={source!r} is not understood; allowed: {HUB}OWNER/NAME/FILE")
    try:
        return Path(hf_hub_download("/".join(parts[:2]), parts[2], repo_type="dataset"))
    except Exception as error:
        raise ConfigError(f"data.{name}={source!r}: the hub did not give it: {error}") from error


@cache
def _digest(name: str, source: str) -> str:
    return hashlib.sha256(local_file(name, source).read_bytes()).hexdigest()


@cache
def _manual_digest() -> str:
    return hashlib.sha256(_manual().encode()).hexdigest()
