"""The tokenizer of a GGUF file as a folder's files, with the special tokens that the file itself names.

transformers converts the vocabulary. What it says of special tokens is not relied on: version 5.17 gives the beginning
of sequence out as its end, and no version keeps the end of turn (eot) and of message (eom).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ENDS = ("eos", "eot", "eom")
# Fields of the tokenizer that a GGUF file names by id.
_NAMED = {"bos": "bos_token", "eos": "eos_token"}


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer of ``gguf`` and a ``generation_config.json`` with its stop ids into ``folder``."""
    from transformers import AutoTokenizer

    special = special_ids(gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    name_special_tokens(tokenizer, special)
    tokenizer.save_pretrained(folder)
    stops = sorted({special[kind] for kind in _ENDS if kind in special})
    if stops:
        path = folder / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")


def special_ids(gguf: Path) -> dict[str, int]:
    """Ids of the special tokens bos, eos, eot and eom that the file's metadata names."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    keys = {kind: f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", *_ENDS)}
    return {kind: int(fields[key].contents()) for kind, key in keys.items() if key in fields}


def name_special_tokens(tokenizer: Any, special: dict[str, int]) -> None:
    """Make the tokenizer's beginning and end of sequence those of ``special``; ids outside its vocabulary are left."""
    for kind, field in _NAMED.items():
        if kind in special and 0 <= special[kind] < len(tokenizer):
            setattr(tokenizer, field, tokenizer.convert_ids_to_tokens(special[kind]))
