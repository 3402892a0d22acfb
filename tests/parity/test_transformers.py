"""The decoder against transformers: logits, greedy tokens, every supported architecture and RoPE variant."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dualdecoder.checkpoints import load_model, resolve
from dualdecoder.engine import Engine
from dualdecoder.model import Decoder
from dualdecoder.prefill import prefill

TOLERANCE = 1e-3
TOKENS = 300
SMALL = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Larger than the usual 0.02, so that attention is far from uniform and a mistake in it shows.
    "initializer_range": 0.3,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CONFIGS = {
    "llama-3.1": LlamaConfig(**SMALL, rope_parameters=LLAMA31_ROPE),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters=LINEAR_ROPE),
    "mistral": MistralConfig(**SMALL, sliding_window=None, head_dim=32),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-yarn": Qwen2Config(**SMALL, rope_parameters=YARN_ROPE),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
}


def all_logits(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    hidden_TE = prefill(model, token_ids, lambda *_: None)
    return model.logits(hidden_TE[None])[0]


@torch.inference_mode()
def assert_same_logits(model: Decoder, reference: torch.nn.Module, token_ids: list[int]) -> None:
    expected = reference(torch.tensor([token_ids])).logits[0]
    assert (all_logits(model, token_ids) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_random_small_models(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    for parameter_name, parameter in reference.named_parameters():
        if "norm" in parameter_name or "bias" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, 0.3)
    reference.save_pretrained(tmp_path)
    token_ids = torch.randint(SMALL["vocab_size"], (TOKENS,)).tolist()
    assert_same_logits(load_model(str(tmp_path)), reference, token_ids)


@pytest.fixture(scope="module")
def reference_smollm2() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(resolve("smollm2"), dtype=torch.float32).eval()


def test_smollm2_logits(smollm2: Engine, manual, reference_smollm2: torch.nn.Module) -> None:
    assert_same_logits(smollm2.model, reference_smollm2, manual(TOKENS))


def test_smollm2_greedy_tokens(smollm2: Engine, manual, reference_smollm2: torch.nn.Module) -> None:
    prompt = manual(TOKENS)
    output = reference_smollm2.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, TOKENS), max_new_tokens=64, do_sample=False
    )
    expected = output[0, TOKENS:].tolist()
    assert smollm2.generate([prompt], max_new_tokens=64)[0].token_ids == expected


def test_sharded_checkpoint_gives_the_same_weights(tmp_path) -> None:
    torch.manual_seed(1)
    reference = AutoModelForCausalLM.from_config(CONFIGS["qwen3"], dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_logits(load_model(str(tmp_path)), reference, list(range(50)))
