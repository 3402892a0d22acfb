"""Named model shapes, for planning memory and for random weights. Source: each model's config.json on its hub page."""

from __future__ import annotations

from dualdecoder.config import ModelConfig, RopeConfig

_LLAMA31_ROPE = RopeConfig(theta=500_000.0, kind="llama3", factor=8.0)
_LLAMA_8B = {"layers": 32, "width": 4096, "mlp_width": 14336, "query_heads": 32, "kv_heads": 8, "head_dim": 128}
_QWEN_ROPE = RopeConfig(theta=1_000_000.0)

SHAPES: dict[str, ModelConfig] = {
    shape.name: shape
    for shape in (
        # The paper serves Llama-3-8B beyond its own 8K; the long-context variant has the same shape.
        ModelConfig(
            "llama-3-8b", **_LLAMA_8B, vocabulary=128256, max_context=1_048_576, rope=RopeConfig(theta=500_000.0)
        ),
        ModelConfig("llama-3.1-8b", **_LLAMA_8B, vocabulary=128256, max_context=131_072, rope=_LLAMA31_ROPE),
        ModelConfig("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 131_072, _QWEN_ROPE, 1e-6, qkv_bias=True),
        ModelConfig("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, 131_072, _QWEN_ROPE, qkv_bias=True),
        ModelConfig("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064, 131_072, _QWEN_ROPE, qkv_bias=True),
        ModelConfig("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, 40_960, _QWEN_ROPE, 1e-6, qk_norm=True),
        ModelConfig("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, RopeConfig(100_000.0), tied_embeddings=True),
        ModelConfig("tiny", 4, 64, 128, 4, 2, 16, 512, 4096),
    )
}
