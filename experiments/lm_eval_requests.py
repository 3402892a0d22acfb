"""lm-eval's requests in the form that lm-eval's own `hf` gives them: what is cut, and what is refused."""

import logging
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from dualdecoder.errors import ConfigError, ContextError, require

Pair = tuple[list[int], list[int]]
"""Token ids of a context and of its continuation."""
Texts = tuple[str, str] | None
"""The texts of a pair; None for a window of a longer text."""

_NUMBERS: dict[str, type | tuple[type, ...]] = {"temperature": (int, float), "top_p": (int, float)}
_NUMBERS |= dict.fromkeys(("top_k", "seed", "max_gen_toks"), int)
SAMPLING = ("temperature", "top_k", "top_p", "seed")
_log = logging.getLogger(__name__)


def fitted(texts: Texts, context: list[int], continuation: list[int], longest: int) -> Pair:
    """The pair with at most ``longest`` tokens before the last one, which is never an input; cut from the left.

    Raises ``ConfigError`` for a context or a continuation without tokens (``hf`` asserts that there are some), and
    ``ContextError`` for a continuation that alone is longer.
    """
    shown = texts or ("", "")
    require(len(context) >= 1, "context", shown[0], "a text of at least one token before white space, or an empty text")
    allowed = "a text of at least one token after its context"
    require(len(continuation) >= 1, "continuation", shown[1], allowed)
    if len(continuation) > longest:
        raise ContextError(
            f"continuation: {len(continuation)} tokens exceed the model's context; allowed: at most {longest}"
        )
    excess = len(context) + len(continuation) - (longest + 1)
    if excess > 0:
        _log.warning("context of %d tokens: the first %d are cut, to fit the model's", len(context), excess)
    return context[max(excess, 0) :], continuation


def generation_settings(options: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's generation options as the engine takes them: until, max_gen_toks and those of ``SAMPLING``.

    Raises ``ConfigError`` for an option that the engine has no match for, or a value that it cannot take.
    """
    try:
        settings = normalize_gen_kwargs(options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"gen_kwargs={options!r} is not allowed ({error}); allowed: numbers as numbers") from error
    sampled = settings.pop("do_sample")
    for name in set(settings) - {*SAMPLING, "until", "max_gen_toks"}:
        raise ConfigError(f"gen_kwargs.{name} is not known; allowed: until, max_gen_toks, {', '.join(SAMPLING)}")
    for name in set(settings) & set(_NUMBERS):
        number = isinstance(settings[name], _NUMBERS[name]) and not isinstance(settings[name], bool)
        require(
            number,
            f"gen_kwargs.{name}",
            settings[name],
            "a number" if name in ("temperature", "top_p") else "an integer",
        )
    stops = settings["until"]
    require(all(isinstance(stop, str) for stop in stops), "gen_kwargs.until", stops, "a text or a list of texts")
    require(isinstance(sampled, bool), "gen_kwargs.do_sample", sampled, "true or false")
    warm = settings.get("temperature", 0) > 0
    require(warm or not sampled, "gen_kwargs.temperature", settings.get("temperature"), "above 0 with do_sample")
    return settings
