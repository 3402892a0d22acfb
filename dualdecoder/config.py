"""Model shapes and method settings, validated where they are made.

Symbols used all over the package (suffixes of tensor names):
B sequences, R query rows of one step (1 or 2), T tokens, L layers, H query heads, K KV heads, G = H / K,
D head size, E model width, F MLP width, V vocabulary, N chunks, S selected chunks, C tokens of a chunk,
O outlier chunks, W tokens of the recent window, X ("record") = K then V of one chunk.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from dualdecoder.checks import is_integer, is_number, require_integer
from dualdecoder.errors import require
from dualdecoder.rope_config import RopeConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-family decoder (Llama 3/3.1, Mistral, Qwen2/2.5, Qwen3).

    ``max_context`` is in tokens. A model with a sliding attention window is limited to that window, inside
    which it equals full attention.
    """

    name: str
    layers: int
    width: int
    mlp_width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_context: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "width",
            "mlp_width",
            "query_heads",
            "kv_heads",
            "head_dim",
            "vocabulary",
            "max_context",
        ):
            require(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "a positive integer")
        require(
            self.query_heads % self.kv_heads == 0,
            "model.query_heads",
            self.query_heads,
            f"a multiple of {self.kv_heads}",
        )
        require(self.head_dim % 2 == 0, "model.head_dim", self.head_dim, "an even number")
        factors, pairs = self.rope.pair_factors, self.head_dim // 2 if self.rope.kind == "longrope" else 0
        require(len(factors) == pairs, "rope.pair_factors", factors, f"{pairs} numbers (kind {self.rope.kind})")

    @property
    def group(self) -> int:
        """Query heads that share one KV head (G)."""
        return self.query_heads // self.kv_heads

    @classmethod
    def from_transformers(cls, hf: Any, name: str) -> ModelConfig:
        """Read a transformers config object.

        Raises ``ConfigError`` for an architecture or variant that the decoder does not implement.
        """
        require(hf.model_type in ARCHITECTURES, "model_type", hf.model_type, ", ".join(ARCHITECTURES))
        _reject_unsupported(hf)
        rope = RopeConfig.from_parameters(hf.rope_parameters, hf.max_position_embeddings)
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return cls(
            name=name,
            layers=hf.num_hidden_layers,
            width=hf.hidden_size,
            mlp_width=hf.intermediate_size,
            query_heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
            head_dim=head_dim,
            vocabulary=hf.vocab_size,
            max_context=_max_context(hf, rope),
            rope=rope,
            norm_eps=hf.rms_norm_eps,
            qkv_bias=hf.model_type == "qwen2",
            qk_norm=hf.model_type == "qwen3",
            tied_embeddings=bool(hf.tie_word_embeddings),
        )


def _reject_unsupported(hf: Any) -> None:
    require(hf.hidden_act == "silu", "hidden_act", hf.hidden_act, "silu")
    # Qwen2's projections always have a bias; its config has no such field, and some files carry one.
    for name in () if hf.model_type == "qwen2" else ("attention_bias", "mlp_bias"):
        require(not getattr(hf, name, False), name, True, "False")


def _max_context(hf: Any, rope: RopeConfig) -> int:
    context = rope.context(hf.max_position_embeddings)
    return min(context, _window(hf) or context)


def _window(hf: Any) -> int | None:
    """Tokens of the narrowest sliding attention window; None if every layer attends to everything."""
    window = getattr(hf, "sliding_window", None) if getattr(hf, "use_sliding_window", True) else None
    kinds = getattr(hf, "layer_types", None) or []
    for kind in kinds:
        require(kind in ("full_attention", "sliding_attention"), "layer_types", kind, "full and sliding_attention")
    if hf.model_type not in ("qwen2", "qwen3"):  # the others slide in every layer, or in none
        return window
    slides = "sliding_attention" in kinds
    require(window is not None or not slides, "sliding_window", window, "a window for the layers that slide")
    return window if slides else None


@dataclass(frozen=True)
class MethodConfig:
    """Settings of a KV method. Subclasses add fields; ``from_options`` turns keyword options into one."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            # A bool is an int to Python, and never what a number field means.
            fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            require(fits, name, value, getattr(kind, "__name__", str(kind)))

    @classmethod
    def from_options(cls, method: str, options: dict[str, Any]) -> MethodConfig:
        """Build from keyword options. Raises ``ConfigError`` naming an unknown option and the known ones."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name, value in options.items():
            require(name in known, f"option {name} of method {method}", value, ", ".join(known) or "no options")
        return cls(**options)


SPECULATIONS = ("self", "random_first", "random", "none")
SCHEDULES = ("layer_aware", "on_demand")
URGENTS = ("gather", "in_place")
# What torch's generators take.
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class ChunkConfig(MethodConfig):
    """Settings of a method that selects chunks of the context (defaults as in ``design.md`` section 4).

    budget: selected tokens per KV head and step; a multiple of ``chunk``.
    chunk: tokens of a chunk.
    outliers_per_1024: outlier chunks per 1024 tokens of budget; at least one is always kept.
    local: newest prompt tokens that stay on the GPU; a multiple of ``chunk``.
    host_sequences: sequences that the host keeps KV for; 0 for all. Fewer share it, for measuring transfers only.
    """

    budget: int = 2048
    chunk: int = 8
    outliers_per_1024: int = 24
    local: int = 32
    host_sequences: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chunk >= 1, "chunk", self.chunk, "a positive number of tokens")
        for name in ("budget", "local"):
            self._require_chunks(name)
        require(self.outliers_per_1024 >= 0, "outliers_per_1024", self.outliers_per_1024, "0 or more chunks")
        require(self.host_sequences >= 0, "host_sequences", self.host_sequences, "0 (all) or a number of sequences")

    def _require_chunks(self, name: str) -> None:
        value = getattr(self, name)
        ok = value >= self.chunk and value % self.chunk == 0
        require(ok, name, value, f"a positive multiple of chunk ({self.chunk} tokens)")

    @property
    def outliers(self) -> int:
        """Outlier chunks per KV head (O)."""
        return max(1, round(self.outliers_per_1024 * self.budget / 1024))


@dataclass(frozen=True)
class DualDecoderConfig(ChunkConfig):
    """Settings of the DualDecoder method (paper sections 4 and 5), besides those of ``ChunkConfig``.

    window: capacity in tokens of the recent window (local + generated); beyond it the oldest chunk is flushed.
    speculation: where the second row's token comes from. self: the previous second row, started with the true
        second token; random_first: the same, started with a random token; random: a random token each step;
        none: one row, no prediction.
    schedule: layer_aware: prefetch two layers ahead; on_demand: fetch only when the selection is known.
    urgent: how missing chunks arrive. gather: a kernel on the urgent stream copies them before attention starts (the
        paper's way); in_place: attention itself reads them from host memory, beside what it reads from the buffer.
    """

    window: int = 64
    speculation: str = "self"
    schedule: str = "layer_aware"
    urgent: str = "gather"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_chunks("window")
        minimum = self.local + 2 * self.chunk
        require(self.window >= minimum, "window", self.window, f"at least local + 2 chunks = {minimum} tokens")
        require(self.speculation in SPECULATIONS, "speculation", self.speculation, ", ".join(SPECULATIONS))
        require(self.schedule in SCHEDULES, "schedule", self.schedule, ", ".join(SCHEDULES))
        require(self.urgent in URGENTS, "urgent", self.urgent, ", ".join(URGENTS))

    @property
    def attended_tokens(self) -> int:
        """Tokens that a row attends to right after a long prompt: selected + outliers + local.

        Generated tokens and the row itself come on top. Methods are compared at equal numbers of these.
        """
        return self.budget + self.outliers * self.chunk + self.local


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. temperature 0 is greedy; top_k and top_p cut the distribution first."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        t, k, p = self.temperature, self.top_k, self.top_p
        require(is_number(t) and t >= 0, "temperature", t, "0 (greedy) or a positive number")
        require(k is None or (is_integer(k) and k >= 1), "top_k", k, "a positive integer or None")
        require(p is None or (is_number(p) and 0 < p <= 1), "top_p", p, "a number in (0, 1] or None")
        require_integer("seed", self.seed, 0, MOST_SEED)
        # numpy's numbers were let in, and torch's generators do not take them.
        plain = {"temperature": float(t), "top_k": k and int(k), "top_p": p and float(p), "seed": int(self.seed)}
        for name, value in plain.items():
            object.__setattr__(self, name, value)


def dtype_from_name(name: Any) -> Any:
    """torch's dtype for float32, bfloat16 or float16, given by name or as itself. Raises ``ConfigError``."""
    import torch

    allowed = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    short = str(name).removeprefix("torch.") if isinstance(name, torch.dtype) else name
    require(isinstance(short, str) and short in allowed, "dtype", short, ", ".join(allowed))
    return allowed[short]
