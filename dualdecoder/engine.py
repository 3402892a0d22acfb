"""Prefill and decode of text with any KV method. Start reading here: ``Engine.stream``, ``decode.py``, ``step.py``.

Suffixes: B sequences, V vocabulary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from dualdecoder.checkpoints import RANDOM_PREFIX, load_model, load_tokenizer, resolve
from dualdecoder.checks import require_integer
from dualdecoder.completions import Completion, Run, RunStatistics, TokenEvent
from dualdecoder.config import MethodConfig, SamplingConfig, dtype_from_name
from dualdecoder.decode import ChooseTokens, decode
from dualdecoder.devices import checked_device
from dualdecoder.draft import DraftSpeculator
from dualdecoder.errors import ContextError, require
from dualdecoder.finite import finite_rows, not_finite, require_finite
from dualdecoder.ledger import MemoryPlan
from dualdecoder.method import KVMethod, method_class, method_config
from dualdecoder.model import Decoder
from dualdecoder.planning import check_memory, plan_memory
from dualdecoder.prefill import PrefillSnapshot, prefill_into
from dualdecoder.prompts import Prompt, chat_text, encoded, prompt_list
from dualdecoder.reading_bar import OnLayer
from dualdecoder.sampling import Sampler, SelfSpeculator, Speculator
from dualdecoder.stop_ids import checked_stop_ids, checkpoint_stop_ids, tokenizer_stop_ids
from dualdecoder.text import TextPieces

GREEDY = SamplingConfig()


class Engine:
    """A model, a tokenizer and a KV method. Memory for keys and values is taken per call and freed after it.

    ``stop_ids``: token ids that end a sequence; None for the tokenizer's own.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        method: str,
        config: MethodConfig,
        stop_ids: Iterable[int] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.method_name, self.config = model, tokenizer, method, config
        vocabulary = model.config.vocabulary
        own = tokenizer_stop_ids(tokenizer, vocabulary)
        self.stop_ids = own if stop_ids is None else checked_stop_ids(stop_ids, vocabulary)
        self.statistics = RunStatistics()
        self.draft: Decoder | None = None
        _check_device(model.device, method)

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        method: str = "dualdecoder",
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> Engine:
        """Load ``model`` (see ``load_model``) for ``method`` with its options, for example ``budget=1024``.

        Raises ``ConfigError``, ``CheckpointError``. Settings are checked before the checkpoint is read.
        """
        config, torch_dtype = method_config(method, options), dtype_from_name(dtype)
        place = _check_device(device, method)
        if str(model).startswith(RANDOM_PREFIX):
            return cls(load_model(model, torch_dtype, place), None, method, config)
        tokenizer, decoder = load_tokenizer(model), load_model(model, torch_dtype, place)
        stop_ids = checkpoint_stop_ids(resolve(model), tokenizer, decoder.config.vocabulary)
        return cls(decoder, tokenizer, method, config, stop_ids)

    def with_method(self, method: str, **options: Any) -> Engine:
        """The same model and tokenizer with another method or other options."""
        return Engine(self.model, self.tokenizer, method, method_config(method, options), self.stop_ids)

    def plan(self, batch: int, context: int) -> MemoryPlan:
        """Bytes by category for ``batch`` sequences of ``context`` tokens; nothing is allocated."""
        return plan_memory(self.model.config, self.method_name, self.config, batch, context, self.model.dtype)

    def generate(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 128, sampling: SamplingConfig = GREEDY
    ) -> list[Completion]:
        """Complete the prompts (text, or token ids) together as one ragged batch. Counters: ``self.statistics``.

        Raises ``ContextError`` if a prompt plus ``max_new_tokens`` exceeds the model's context,
        ``CapacityError`` if memory is short.
        """
        encoded = self._encode_all(prompts)
        tokens: list[list[int]] = [[] for _ in encoded]
        reasons = ["length"] * len(encoded)
        for event in self.stream(encoded, max_new_tokens, sampling):
            tokens[event.sequence].append(event.token_id)
            reasons[event.sequence] = event.finish_reason or "length"
        done = zip(tokens, encoded, reasons, strict=True)
        return [Completion(self.text(new), new, len(prompt), reason) for new, prompt, reason in done]

    def stream(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 128,
        sampling: SamplingConfig = GREEDY,
        on_layer: OnLayer | None = None,
    ) -> Iterator[TokenEvent]:
        """Like ``generate``, token by token. The stop token is yielded too, with no text of its own.

        ``on_layer`` is called while the prompts are read, with the layers done and those of all prompts.
        """
        encoded = self._encode_all(prompts)
        run = self.start(encoded, max_new_tokens, sampling, self.stop_ids, on_layer)
        memory = run.method.ledger.plan().with_gpu(weights=self.model.weight_bytes())
        lengths = [len(prompt) for prompt in encoded]
        statistics = RunStatistics(run.prefill_s, prompts=len(lengths), prompt_tokens=sum(lengths), memory=memory)
        self.statistics = statistics
        pieces = [TextPieces(self.tokenizer) for _ in encoded]
        for taken, (tokens, active, seconds) in enumerate(_rounds(run), start=1):
            statistics.new_tokens += sum(active)
            statistics.decode_s += seconds
            statistics.method = run.method.statistics()
            for b, token in enumerate(tokens):
                if active[b]:
                    yield self._event(b, token, pieces[b], last=taken == max_new_tokens)

    def start(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        sampling: SamplingConfig = GREEDY,
        stop_ids: Iterable[int] = (),
        on_layer: OnLayer | None = None,
    ) -> Run:
        """Prefill a ragged batch; the run then takes up to ``max_new_tokens - 1`` steps. ``on_layer``: see stream."""
        encoded = self._encode_all(prompts)
        done = count(1)

        def after_layer() -> None:
            if on_layer is not None:
                on_layer(next(done), self.model.config.layers * len(encoded))

        def fill(method: KVMethod, sequence: int) -> Tensor:
            return prefill_into(self.model, method, sequence, encoded[sequence], after_layer)

        return self._begin(encoded, fill, max_new_tokens, sampling, stop_ids)

    def resume(
        self,
        snapshots: Sequence[PrefillSnapshot],
        max_new_tokens: int,
        sampling: SamplingConfig = GREEDY,
        stop_ids: Iterable[int] = (),
        choose: ChooseTokens | None = None,
    ) -> Run:
        """Like ``start``, from stored prefills. ``choose`` replaces the sampler, for example by known tokens.

        The token that ``choose`` gives last is nobody's input and needs no place in the model's context.
        """

        def fill(method: KVMethod, sequence: int) -> Tensor:
            return snapshots[sequence].replay(method, sequence)

        return self._begin([s.token_ids for s in snapshots], fill, max_new_tokens, sampling, stop_ids, choose)

    def prefill(self, prompt: Prompt) -> PrefillSnapshot:
        """Prefill one prompt and keep its tensors, to be decoded by any number of methods with ``resume``."""
        token_ids = self.encode(prompt)
        self._check([token_ids], 1)
        return PrefillSnapshot.take(self.model, token_ids)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text prompt as the tokenizer gives them; ids are passed through, from arrays too."""
        return encoded(prompt, self.tokenizer)

    def chat(self, message: str) -> list[int]:
        """Token ids of one user message in the model's chat template, ready for the answer.

        Raises ``ConfigError`` if the model has no template, or if its template refuses the message.
        """
        require(isinstance(message, str), "chat: message", message, "text")
        text = chat_text(self.tokenizer, [{"role": "user", "content": message}], add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of generated tokens without stop tokens; empty if there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode([t for t in token_ids if t not in self.stop_ids])

    def _begin(
        self,
        prompts: list[list[int]],
        fill: Callable[[KVMethod, int], Tensor],
        max_new_tokens: int,
        sampling: SamplingConfig,
        stop_ids: Iterable[int],
        choose: ChooseTokens | None = None,
    ) -> Run:
        self._check(prompts, max_new_tokens, needs_last=choose is None)
        require(isinstance(sampling, SamplingConfig), "sampling", sampling, "a SamplingConfig")
        lengths = [len(prompt) for prompt in prompts]
        method = self._allocate(len(prompts), max(lengths) + max_new_tokens)
        _check_decode_capacity(method, max_new_tokens)
        self._load_draft(method)
        begin = time.perf_counter()
        speculator = self._speculator(method, prompts, sampling)
        logits_BV = torch.stack([self._fill(fill, method, sequence) for sequence in range(len(prompts))])
        prefill_s = time.perf_counter() - begin
        require_finite(finite_rows(logits_BV).tolist(), self.model.dtype)
        choose = choose or Sampler(sampling)
        first = choose(logits_BV[:, None], torch.tensor(lengths) - 1)[:, 0].tolist()
        steps = decode(self.model, method, first, lengths, choose, speculator, frozenset(stop_ids))
        return Run(method, first, islice(steps, max_new_tokens - 1), prefill_s)

    def _fill(self, fill: Callable[[KVMethod, int], Tensor], method: KVMethod, sequence: int) -> Tensor:
        try:
            return fill(method, sequence)
        except torch.linalg.LinAlgError as error:
            # Nothing else makes the decompositions of a method's prefill fail.
            raise not_finite(sequence, "the prompt's queries or keys", self.model.dtype) from error

    def _allocate(self, batch: int, context: int) -> KVMethod:
        chosen = method_class(self.method_name)
        model, dtype = self.model.config, self.model.dtype
        check_memory(chosen.plan(model, self.config, batch, context, dtype, self.model.device.type), self.model.device)
        return chosen(model, self.config, batch=batch, context=context, dtype=dtype, device=self.model.device)

    def _load_draft(self, method: KVMethod) -> None:
        if method.speculation == "draft" and self.draft is None:
            self.draft = load_model(method.draft, self.model.dtype, str(self.model.device))

    def _speculator(self, method: KVMethod, prompts: list[list[int]], sampling: SamplingConfig) -> Speculator | None:
        vocabulary = self.model.config.vocabulary
        if method.rows == 1:
            return None
        if method.speculation == "draft":
            assert self.draft is not None, "loaded before the prefill"
            return DraftSpeculator(self.draft, vocabulary, prompts, method.context)
        return SelfSpeculator(method.speculation, vocabulary, sampling.seed)

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        fields = enumerate(prompt_list(prompts))
        return [encoded(prompt, self.tokenizer, f"prompts[{number}]") for number, prompt in fields]

    def _event(self, sequence: int, token: int, pieces: TextPieces, last: bool) -> TokenEvent:
        if token in self.stop_ids:
            return TokenEvent(sequence, token, pieces.rest(), "stop")
        text = pieces.add(token) + (pieces.rest() if last else "")
        return TokenEvent(sequence, token, text, "length" if last else None)

    def _check(self, prompts: list[list[int]], max_new_tokens: int, needs_last: bool = True) -> None:
        require_integer("max_new_tokens", max_new_tokens, 1)
        require(len(prompts) >= 1, "prompts", prompts, "at least one prompt")
        model = self.model.config
        for number, prompt in enumerate(prompts):
            name = f"prompts[{number}]"
            require(len(prompt) >= 1, name, prompt, "at least one token")
            outside = [token for token in prompt if not 0 <= token < model.vocabulary]
            require(not outside, name, outside[:3], f"token ids from 0 to {model.vocabulary - 1}")
            needed = len(prompt) + max_new_tokens
            if needed > model.max_context + (not needs_last):
                raise ContextError(
                    f"{name}: {len(prompt)} tokens + max_new_tokens={max_new_tokens} = {needed} exceed the context of "
                    f"{model.name}; allowed: at most {model.max_context}"
                )


def _check_decode_capacity(method: KVMethod, max_new_tokens: int) -> None:
    most = method.decode_capacity
    if most is not None and max_new_tokens > most:
        raise ContextError(f"max_new_tokens={max_new_tokens}: this method decodes at most {most} tokens after a prompt")


def _check_device(device: str | torch.device, method: str) -> torch.device:
    return checked_device(device, method_class(method).devices, f"method {method}")


def _rounds(run: Run) -> Iterator[tuple[list[int], list[bool], float]]:
    """The prompts' first tokens, then every step's: tokens, whose of them count, and the step's seconds."""
    yield run.first_tokens, [True] * len(run.first_tokens), 0.0
    for step in run.steps:
        yield step.token_B, step.active_B, step.seconds
