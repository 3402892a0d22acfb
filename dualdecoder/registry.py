"""The methods that have a name. Nothing here imports torch, so that help can list them at once."""

from __future__ import annotations

# Dotted paths, so that naming a method imports nothing but that method.
REGISTRY: dict[str, str] = {
    "dualdecoder": "dualdecoder.dual:DualDecoder",
    "full_kv": "baselines.full_kv:FullKV",
    "full_offload": "baselines.full_offload:FullOffload",
    "shadowkv": "baselines.shadowkv:ShadowKV",
    "specache": "baselines.specache:SpeCache",
    "oasiskv": "baselines.oasiskv:OasisKV",
    "infinigen": "baselines.infinigen:InfiniGen",
    "quest": "baselines.quest:Quest",
    "h2o": "baselines.h2o:H2O",
    "streaming_llm": "baselines.streaming_llm:StreamingLLM",
}
