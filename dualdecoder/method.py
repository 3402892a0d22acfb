"""The contract between the engine and a KV method, and how a method is found by its name.

A method owns the keys and values of all layers. The engine owns tokens, positions, weights and the loop.
Suffixes: B sequences, R rows, T prompt tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import isabstract
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dualdecoder.checks import require_integer
from dualdecoder.config import MethodConfig, ModelConfig
from dualdecoder.errors import ConfigError, one_line, require
from dualdecoder.ledger import Ledger, MemoryPlan
from dualdecoder.registry import REGISTRY


class PrefillSink(Protocol):
    """Takes one layer's tensors of one sequence: a method, or a snapshot that is handed to methods later."""

    def __call__(self, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None: ...


# (layer, true set of row 0, set of the last row) -> the two sets to go on with, each [B, K, S]. For replaying known
# selections and for forcing wrong predictions. A method may ask for groups of sequences, one group after the other.
Rewrite = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]

# (layer, true set of row 0, what its attention has at hand), both unit numbers [B, K, any], int64, ``NO_CHUNK`` for
# none. A unit is a chunk, a block or a token; the true set is what the method's own scoring picks, within its budget,
# for row 0's query in that layer, or what ``rewrite`` puts in its place. What is always attended to is in neither.
Observe = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True)
class Capabilities:
    """What a method can promise.

    exact: its attention is dense attention, up to rounding, with any settings.
    recalls: every token of the context can still be attended to; False where tokens are evicted for good.
    offloads: keys or values of the context are kept in host memory.
    dense: every token is attended to in every step, be it in low bits. What is exact is dense.
    limits: what it cannot do, in a sentence; empty if nothing.
    """

    exact: bool
    recalls: bool
    offloads: bool
    limits: str = ""
    dense: bool = False


class KVMethod(ABC):
    """Keys and values of ``batch`` sequences of up to ``context`` tokens each, and the attention over them.

    rows: query rows per sequence and decode step, 1 or 2; with 2, row 1 is the speculated successor of row 0.
    speculation: with two rows, where row 1's token comes from: one of ``SPECULATIONS``, or draft.
    draft: with speculation "draft", the model whose greedy next token it is, as ``load_model`` names it.
    devices: device types that the implementation runs on.
    graphable: on a GPU, whether full steps may be replayed from one CUDA graph.
    foresees: whether ``foresee`` is to be called.
    decode_capacity: most tokens that can be decoded after a prompt; None for no limit.
    transfers: on a GPU, False switches the link off, only to time a step without it; results are then meaningless.
    rewrite: replaces the sets of a method that selects chunks; None lets them be.
    observe: told of each layer that selects, in a full step, what should be attended to and what is. A method may do
        more work for it, so observed steps are neither timed nor replayed from a graph; None in all others.
    copies_layers: whether some transfers are plain copies of a layer's whole KV, which are faster than gathers.
    micro_batches: sequences that go through the layers together. Several take turns: while one waits for its
        transfers, the next computes.

    Decode is ``begin_step``, attention once per layer in order, ``end_step``. Nothing in it may depend on the
    value of device data from the host side: no ``.item()``, no data-dependent shape, no branch.
    """

    config_class: ClassVar[type[MethodConfig]]
    capabilities: ClassVar[Capabilities]
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    graphable: bool = False
    rows: int = 1
    speculation: str = "none"
    draft: str = ""
    foresees: ClassVar[bool] = False
    decode_capacity: int | None = None
    transfers: bool = True
    rewrite: Rewrite | None = None
    observe: Observe | None = None
    copies_layers: ClassVar[bool] = False
    micro_batches: tuple[slice, ...] = (slice(None),)

    def __init__(
        self,
        model: ModelConfig,
        config: MethodConfig,
        *,
        batch: int,
        context: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        planned_for: str | None = None,
    ) -> None:
        """Take the memory. ``planned_for`` is the device type that a plan on the ``meta`` device is made for."""
        require_integer("batch", batch, 1)
        require_integer("context", context, 1)
        self.model, self.config = model, config
        self.batch, self.context, self.dtype = batch, context, dtype
        self.ledger = Ledger(device)
        self.device_type = planned_for or self.ledger.device.type
        self.allocate()

    @classmethod
    def plan(
        cls,
        model: ModelConfig,
        config: MethodConfig,
        batch: int,
        context: int,
        dtype: torch.dtype,
        device_type: str = "cpu",
    ) -> MemoryPlan:
        """Bytes by category that ``__init__`` with the same arguments takes on such a device, without taking them."""
        sizes: dict[str, Any] = {"batch": batch, "context": context, "dtype": dtype}
        return cls(model, config, **sizes, device="meta", planned_for=device_type).ledger.plan()

    @abstractmethod
    def allocate(self) -> None:
        """Take all memory through ``self.ledger``; called once."""

    @abstractmethod
    def prefill_layer(
        self, sequence: int, layer: int, q_THD: Tensor, k_pre_rope_TKD: Tensor, k_TKD: Tensor, v_TKD: Tensor
    ) -> None:
        """Take the prompt's tensors of one layer of one sequence. Called once per layer, in order."""

    @abstractmethod
    def begin_step(self, rows: int, commit_B: Tensor) -> None:
        """Start a step of ``rows`` rows, at most ``self.rows``.

        ``commit_B`` (bool): row 0 of these sequences becomes part of the context. All other rows leave no trace.
        """

    def foresee(self, layer: int, q_BRHD: Tensor) -> None:
        """Take a guess at the rotated queries of ``layer``: its projection of the input of the layer before.

        Called in decode for a method with ``foresees``, before ``attend`` of the layer before.
        """
        raise NotImplementedError

    @abstractmethod
    def attend(self, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor) -> Tensor:
        """Attention output ``[B, R, H, D]`` of this step's rows. Rows are causal among themselves."""

    def begin_attention(
        self, micro_batch: int, layer: int, q_BRHD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor
    ) -> Callable[[], Tensor]:
        """Start ``attend`` for the sequences of one of ``micro_batches``; the returned call gives their output.

        Until that call, which comes before the micro-batch's next layer, the other micro-batches have their turn. This
        one starts nothing ahead; a method with several micro-batches has its own.
        """
        assert len(self.micro_batches) == 1, "attend takes all sequences"
        return partial(self.attend, layer, q_BRHD, k_BRKD, v_BRKD)

    @abstractmethod
    def end_step(self) -> None:
        """Finish a step: lengths advance where ``commit_B`` was set."""

    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes of its state that a full step has to read from device memory at the present lengths, all layers.

        What crosses the link is counted once, as read by attention. With the weights this is the floor of a step.
        """

    def fill_synthetic(self, tokens: int, seed: int = 0) -> None:
        """Make every sequence ``tokens`` long with seeded normal values, for measuring without a prompt.

        This one goes through ``prefill_layer``; a method for which that is slow fills its state itself.
        """
        require(0 < tokens < self.context, "tokens", tokens, f"1 to {self.context - 1}")
        generator = torch.Generator(self.ledger.device).manual_seed(seed)

        def normal(heads: int) -> Tensor:
            shape = (tokens, heads, self.model.head_dim)
            return torch.empty(shape, dtype=self.dtype, device=self.ledger.device).normal_(generator=generator)

        q_THD, k_TKD, v_TKD = (normal(n) for n in (self.model.query_heads, self.model.kv_heads, self.model.kv_heads))
        for layer in range(self.model.layers):
            for sequence in range(self.batch):
                self.prefill_layer(sequence, layer, q_THD, k_TKD, k_TKD, v_TKD)

    def remark(self) -> str:
        """What has to be said beside a speed of this instance, in a phrase with its numbers; empty if nothing."""
        return self.capabilities.limits

    def statistics(self) -> dict[str, float]:
        """Counters since the prefill, summed over layers; empty for a method without transfers.

        A method with transfers counts ``urgent_bytes`` (fetched when needed) and ``prefetched_bytes`` (fetched ahead).
        """
        return {}


def method_class(name: str) -> type[KVMethod]:
    """The class of a registered method, or of a dotted path ``package.module:Class``.

    Raises ``ConfigError`` listing the registered names.
    """
    path = REGISTRY.get(name, name) if isinstance(name, str) else ""
    if ":" not in path:
        raise ConfigError(f"method={name!r} is not known; allowed: {', '.join(REGISTRY)}, or package.module:Class")
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # The module is the user's and may raise anything.
        what = f"{path} cannot be imported: {type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"method={name!r}: {what}") from error
    complete = isinstance(found, type) and issubclass(found, KVMethod) and not isabstract(found)
    allowed = "a subclass of KVMethod that defines its abstract methods, config_class and capabilities"
    declares = all(hasattr(found, name) for name in ("config_class", "capabilities"))
    require(complete and declares, "method", name, allowed)
    return found


def method_config(name: str, options: dict[str, Any]) -> MethodConfig:
    """Validated settings of a method from keyword options."""
    return method_class(name).config_class.from_options(name, options)
