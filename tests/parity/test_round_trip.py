"""Every family in every form of storage: what is loaded gives transformers' logits."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from small_checkpoints import (
    FAMILIES,
    ROPES,
    assert_same,
    loaded_reference,
    reference_logits,
    rounded,
    small_model,
    write_gguf,
)

GGUF_KINDS = {kind.name: kind for kind in map(GGMLQuantizationType, (0, 1, 30, 8, 2))}  # F32, F16, BF16, Q8_0, Q4_0
STORAGE = ("single", "sharded", "bfloat16", *GGUF_KINDS)
PRODUCT = [(f, s, r, tied) for f in FAMILIES for s in STORAGE for r in ROPES for tied in (False, True)]
# Every family with every storage, every rope kind with every storage, tied and not; an eighth of the work.
NAMES = [list(FAMILIES), list(STORAGE), list(ROPES)]
FEW = [c for c in PRODUCT if (NAMES[0].index(c[0]) + NAMES[1].index(c[1]) - NAMES[2].index(c[2])) % 4 == 0]
FEW = [c for c in FEW if c[3] == (NAMES[1].index(c[1]) // 2 + NAMES[0].index(c[0])) % 2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DUALDECODER_CACHE", str(tmp_path / "cache"))


def check(tmp_path: Path, family: str, storage: str, rope: str, tied: bool) -> None:
    model = small_model(family, rope_parameters=dict(ROPES[rope]), tie_word_embeddings=tied)
    if storage in GGUF_KINDS:
        write_gguf(tmp_path / "model.gguf", model, GGUF_KINDS[storage])
        return assert_same(tmp_path / "model.gguf", reference_logits(rounded(model, GGUF_KINDS[storage])))
    shards = {"max_shard_size": "20KB"} if storage == "sharded" else {}
    dtype = torch.bfloat16 if storage == "bfloat16" else torch.float32
    model.to(dtype).save_pretrained(tmp_path / "model", **shards)
    assert (len(list(tmp_path.glob("model/*.safetensors"))) > 1) == (storage == "sharded")
    return assert_same(tmp_path / "model", loaded_reference(tmp_path / "model"))


@pytest.mark.parametrize(("family", "storage", "rope", "tied"), FEW)
def test_a_part_of_the_product(tmp_path: Path, family: str, storage: str, rope: str, tied: bool) -> None:
    check(tmp_path, family, storage, rope, tied)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "storage", "rope", "tied"), PRODUCT)
def test_the_whole_product(tmp_path: Path, family: str, storage: str, rope: str, tied: bool) -> None:
    check(tmp_path, family, storage, rope, tied)


def test_the_part_covers_every_pair() -> None:
    for first, second in ((0, 1), (2, 1), (0, 2), (1, 3)):
        assert {(c[first], c[second]) for c in FEW} == {(c[first], c[second]) for c in PRODUCT}
