"""lm-eval's model "dualdecoder": any task of the harness through ``Engine`` with any KV method.

    import experiments.lm_eval_model  # registers the name
    lm_eval.simple_evaluate(model="dualdecoder", model_args={"model": "smollm2", "method": "full_kv"}, tasks=[...])

A context is prefilled, which is exact with every method, and its continuation is decoded: so log-likelihoods are those
of the method. An exact method is scored by one prefill over both, which gives the same at a fraction of the cost.
Requests are cut, windowed and stopped as by lm-eval's own ``hf``, with every method alike, so the exact ones give its
numbers; what ``hf`` asserts is an error in one line. Finished requests are kept in the file ``resume``; a run that was
stopped goes on after them.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  Registers lm-eval's own models; a name registered before them would hide them all.
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dualdecoder.checkpoints import weights_id
from dualdecoder.config import SamplingConfig
from dualdecoder.engine import Engine
from dualdecoder.errors import ConfigError, require
from dualdecoder.prompts import chat_text
from experiments.harness.identity import answers_identity
from experiments.harness.kept_answers import KeptAnswers
from experiments.lm_eval_requests import SAMPLING, Pair, Texts, fitted, generation_settings
from experiments.lm_eval_scoring import Score, scores

Request = tuple[str, dict[str, Any]]
"""A context, and how to go on after it."""


@register_model("dualdecoder")
class DualDecoderLM(TemplateLM):
    """An engine as a model of lm-eval.

    Args:
        model: see ``load_model``.
        method: name of the KV method; further keywords are its options, such as ``budget=256``.
        batch_size: sequences decoded together, of similar length.
        resume: file that keeps finished requests; empty for none.
        engine: an engine to use instead of loading one by ``model``, ``method``, ``device``, ``dtype`` and options.
        weights: what identifies the weights of ``engine`` in the file ``resume``; None for a digest of them, which
            reads them all. Of a model that is loaded here it is known.

    Raises:
        ConfigError: a setting that is not allowed, a model without text, or a file ``resume`` that cannot be written.
        CheckpointError: ``model`` cannot be read.
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
        weights: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = str(batch_size)
        require(size.isdecimal() and int(size) >= 1, "batch_size", batch_size, "a positive integer")
        if engine is None:
            # Before the weights are read: what is written over them meanwhile is not what this identity stands for.
            weights = weights_id(model) if resume else None
            engine = Engine.from_pretrained(model, method=method, device=device or "cpu", dtype=dtype, **options)
        if engine.tokenizer is None:
            raise ConfigError(f"model={model!r} has no tokenizer; allowed: a model with text")
        self.engine, self.tokenizer, self.batch = engine, engine.tokenizer, int(size)
        identity = answers_identity(engine, weights) if resume else ""
        self.kept = KeptAnswers(Path(str(resume)) if resume else None, identity)

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
        """The dialogue in the model's template; an opened answer at its end stays open.

        A template that refuses the dialogue is given it without the system's turns, as `hf` does.
        Raises ConfigError if there is no template, or if it refuses that, too.
        """
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return chat_text(self.tokenizer, chat_history, **how)
        except ConfigError:
            asked = [turn for turn in chat_history if turn["role"] != "system"]
            if asked == chat_history:
                raise
        return chat_text(self.tokenizer, asked, **how)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that starts with the token before every text does not get another one."""
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Score]:
        """Log-likelihood of each continuation after its context, and whether greedy decoding gives it."""
        for context, continuation in (request.args for request in requests):
            empty = not context and not self.tok_encode(continuation, add_special_tokens=False)
            require(not empty, "continuation", continuation, "a text of at least one token after an empty context")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's context that do not overlap."""
        windows = [self._windows(*request.args) for request in requests]
        flat = iter(self._scores([pair for pairs in windows for pair in pairs], "rolling"))
        return [sum(next(flat)[0] for _ in pairs) for pairs in windows]

    def _windows(self, text: str) -> list[Pair]:
        rolling = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return [make_disjoint_window(pair) for pair in rolling]

    def _loglikelihood_tokens(self, requests: list[tuple[Texts, list[int], list[int]]], **kwargs: Any) -> list[Score]:
        return self._scores([fitted(*request, self.max_length) for request in requests], "loglikelihood")

    def _scores(self, pairs: list[Pair], kind: str) -> list[Score]:
        def answer(group: list[Pair]) -> list[Score]:
            return scores(self.engine, group)

        found = self.kept.answer_all(kind, pairs, answer, self.batch, lambda pair: (-len(pair[0]), pair[0]))
        return [(float(value), bool(greedy)) for value, greedy in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts without special tokens, up to the first stop string, the stop token or the most tokens."""
        items = [(context, generation_settings(options)) for context, options in (request.args for request in requests)]
        for context, settings in items:
            require(self.tok_encode(context) != [], "context", context, "a text of at least one token")
            most = settings["max_gen_toks"]
            allowed = f"from 1 to {self.max_length - 1}, which leaves the context a token"
            require(1 <= most < self.max_length, "gen_kwargs.max_gen_toks", most, allowed)

        def order(item: Request) -> tuple[str, int]:
            # Only requests with the same settings are decoded together.
            return json.dumps(item[1], sort_keys=True), -len(item[0])

        return self.kept.answer_all(
            "generate", _drawn_apart(items), self._generate, self.batch, order, lambda item: item[1]
        )

    def _generate(self, group: list[Request]) -> list[str]:
        settings = group[0][1]
        most, until = settings["max_gen_toks"], self._stop_strings(settings["until"])
        sampling = SamplingConfig(**{name: settings[name] for name in SAMPLING if name in settings})
        # As much of the end of a context as leaves room for the answer.
        prompts = [self.tok_encode(context)[most - self.max_length :] for context, _ in group]
        window = max((len(self.tok_encode(stop, add_special_tokens=False)) for stop in until), default=0) + 2
        answers: list[list[int]] = [[] for _ in group]
        running = set(range(len(group)))
        for event in self.engine.stream(prompts, most, sampling):
            if event.sequence not in running:
                continue
            answer = answers[event.sequence]
            answer.append(event.token_id)
            tail = self.tokenizer.decode(answer[-window:])
            if event.finish_reason or any(stop in tail for stop in until):
                running.discard(event.sequence)
            if not running:
                break
        return [self._text(answer, until) for answer in answers]

    def _stop_strings(self, until: list[str]) -> list[str]:
        end = [] if self.eot_token_id is None else [self.tokenizer.decode(self.eot_token_id)]
        return list(dict.fromkeys((*until, *end)))

    def _text(self, answer: list[int], until: list[str]) -> str:
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return postprocess_generated_text(text, until, think_end_token=None)


def _drawn_apart(items: list[Request]) -> list[Request]:
    """The items, where those that are asked for again with a temperature have seeds of their own."""
    seen: Counter[str] = Counter()
    apart = []
    for context, settings in items:
        if settings.get("temperature"):
            key = json.dumps([context, settings], sort_keys=True)
            settings = {**settings, "seed": settings.get("seed", 0) + seen[key]}
            seen[key] += 1
        apart.append((context, settings))
    return apart
