"""A checkpoint that several tests of lm-eval run on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dualdecoder.checkpoints import resolve


def write_checkpoint(folder: Path, seed: int) -> None:
    """A small random model with a real tokenizer, which likes special tokens."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 49152, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, initializer_range=0.3, bos_token_id=1, eos_token_id=2))
    with torch.no_grad():
        model.lm_head.weight[[0, 1, *range(3, 17)]] *= 3
    model.save_pretrained(folder)
    for path in resolve("smollm2").glob("tokenizer*"):
        shutil.copy(path, folder)


@pytest.fixture(scope="session")
def write() -> Callable[[Path, int], None]:
    """Writes a checkpoint from a seed into a folder."""
    return write_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of seed 0."""
    path = tmp_path_factory.mktemp("special")
    write_checkpoint(path, 0)
    return path
