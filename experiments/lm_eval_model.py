"""lm-eval's model "dualdecoder": any task of the harness through ``Engine`` with any KV method.

    import experiments.lm_eval_model  # registers the name
    lm_eval.simple_evaluate(model="dualdecoder", model_args={"model": "smollm2", "method": "full_kv"}, tasks=[...])

A context is prefilled, which is exact with every method, and its continuation is decoded: so log-likelihoods are those
of the method. An exact method is scored by one prefill over both, which gives the same at a fraction of the cost.
Nothing is ever cut: what does not fit the model's context is an error. Finished requests are kept in the file
``resume``; a run that was stopped goes on after them.
Suffixes: T text tokens, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  Registers lm-eval's own models; a name registered before them would hide them all.
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from dualdecoder.config import SamplingConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError, ContextError, require
from dualdecoder.method import method_class
from dualdecoder.prefill import PrefillSnapshot, prefill
from experiments.harness.kept_answers import KeptAnswers
from experiments.harness.teacher import forced_logits

# Bounds the logits that one exact scoring holds: tokens of a piece.
PIECE_TOKENS = 512
_SAMPLING = {"temperature", "top_k", "top_p", "seed"}
_IGNORED = {"do_sample"}

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""


@register_model("dualdecoder")
class DualDecoderLM(TemplateLM):
    """An engine as a model of lm-eval.

    Args:
        model: see ``load_model``.
        method: name of the KV method; further keywords are its options, such as ``budget=256``.
        batch_size: sequences decoded together, of similar length.
        resume: file that keeps finished requests; empty for none.
        engine: an engine to use instead of loading one by ``method``, ``device``, ``dtype`` and options.
    """

    def __init__(
        self,
        model: str = "smollm2",
        method: str = "dualdecoder",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        resume: str = "",
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = str(batch_size)
        require(size.isdecimal() and int(size) >= 1, "batch_size", batch_size, "a positive integer")
        self.engine = engine or Engine.from_pretrained(
            model, method=method, device=device or "cpu", dtype=dtype, **options
        )
        if self.engine.tokenizer is None:
            raise ConfigError(f"model={model!r} has no tokenizer; allowed: a model with text")
        self.tokenizer = self.engine.tokenizer
        self.batch = int(size)
        self.kept = KeptAnswers(Path(resume) if resume else None, self._identity(model))

    def _identity(self, model: str) -> str:
        engine = self.engine
        return f"{model} {engine.model.dtype} {engine.model.device} {engine.method_name} {engine.config}"

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Stands for an empty context: BOS, or the end of text in a model without one, as in lm-eval's `hf`."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.engine.model.config.max_context

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The dialogue in the model's template; an opened answer at its end stays open."""
        if self.tokenizer.chat_template is None:
            raise ConfigError("chat_template: the tokenizer of this model has none; run without it")
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that starts with the BOS token does not get another one."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's context that do not overlap."""
        windows = [self._windows(*request.args) for request in requests]
        flat = iter(self._scores([pair for pairs in windows for pair in pairs], "rolling"))
        return [sum(next(flat)[0] for _ in pairs) for pairs in windows]

    def _windows(self, text: str) -> list[Pair]:
        ids = self.tok_encode(text, add_special_tokens=False)
        rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
        return [make_disjoint_window(pair) for pair in rolling]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests], "loglikelihood")

    def _scores(self, pairs: list[Pair], kind: str) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is what greedy decoding gives."""
        exact = method_class(self.engine.method_name).capabilities.exact

        def answer(group: list[Pair]) -> list[tuple[float, bool]]:
            return [self._exact_score(*pair) for pair in group] if exact else self._decoded_scores(group)

        found = self.kept.answer_all(kind, pairs, answer, self.batch, lambda pair: (-len(pair[0]), pair[0]))
        return [(float(value), bool(greedy)) for value, greedy in found]

    @torch.inference_mode()
    def _exact_score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        model, tokens = self.engine.model, [*context, *continuation]
        if len(tokens) > self.max_length:
            raise ContextError(
                f"context: {len(tokens)} tokens exceed the {self.max_length} of {model.config.name}; nothing is cut"
            )
        hidden_TE = prefill(model, tokens[:-1], lambda *_: None)[len(context) - 1 :]
        logits = (model.logits(piece_TE[None])[0] for piece_TE in hidden_TE.split(PIECE_TOKENS))
        pieces = torch.tensor(continuation, device=model.device).split(PIECE_TOKENS)
        parts = [_score(*pair) for pair in zip(logits, pieces, strict=True)]
        return sum(value for value, _ in parts), all(greedy for _, greedy in parts)

    def _decoded_scores(self, group: list[Pair]) -> list[tuple[float, bool]]:
        snapshots: dict[tuple[int, ...], PrefillSnapshot] = {}
        for context, _ in group:
            if tuple(context) not in snapshots:
                snapshots[tuple(context)] = self.engine.prefill(context)
        prefills = [snapshots[tuple(context)] for context, _ in group]
        totals, greedy = [0.0] * len(group), [True] * len(group)
        for place, logits_BV in enumerate(forced_logits(self.engine, prefills, [more for _, more in group])):
            for b, (_, continuation) in enumerate(group):
                if place < len(continuation):
                    token = torch.tensor(continuation[place : place + 1], device=logits_BV.device)
                    value, same = _score(logits_BV[b : b + 1], token)
                    totals[b], greedy[b] = totals[b] + value, greedy[b] and same
        return list(zip(totals, greedy, strict=True))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first stop string, the stop token or the most tokens, without the stop."""
        items = [(context, _settings(options)) for context, options in (request.args for request in requests)]

        def order(item: tuple[str, dict[str, Any]]) -> tuple[str, int]:
            # Only requests with the same settings are decoded together.
            return json.dumps(item[1], sort_keys=True), -len(item[0])

        return self.kept.answer_all("generate", items, self._generate, self.batch, order, lambda item: item[1])

    def _generate(self, group: list[tuple[str, dict[str, Any]]]) -> list[str]:
        settings = group[0][1]
        sampling = SamplingConfig(**{name: settings[name] for name in _SAMPLING & set(settings)})
        prompts = [self.tok_encode(context) for context, _ in group]
        texts, open_B = [""] * len(group), set(range(len(group)))
        for event in self.engine.stream(prompts, settings["max_gen_toks"], sampling):
            b = event.sequence
            if b in open_B:
                texts[b] += event.text
                if event.finish_reason or _cut(texts[b], settings["until"]) != texts[b]:
                    open_B.discard(b)
            if not open_B:
                break
        return [_cut(text, settings["until"]) for text in texts]


def _score(logits_TV: Tensor, token_T: Tensor) -> tuple[float, bool]:
    """Sum of the tokens' log-probabilities, and whether each is the most likely one."""
    chosen_T = logits_TV.log_softmax(dim=-1).gather(1, token_T[:, None])[:, 0]
    return float(chosen_T.double().sum()), bool((logits_TV.argmax(dim=-1) == token_T).all())


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's generation options as the engine takes them. Raises ConfigError for one that it has no match for."""
    settings = normalize_gen_kwargs(options)
    for name in set(settings) - _SAMPLING - _IGNORED - {"until", "max_gen_toks"}:
        raise ConfigError(
            f"gen_kwargs.{name} is not known; allowed: until, max_gen_toks, {', '.join(sorted(_SAMPLING))}"
        )
    return {name: value for name, value in settings.items() if name not in _IGNORED}


def _cut(text: str, until: list[str]) -> str:
    """``text`` up to the first of the stop strings."""
    return min((text.partition(stop)[0] for stop in until if stop), key=len, default=text)
