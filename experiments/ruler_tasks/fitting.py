"""Search for the largest haystack that fits a length."""

from collections.abc import Callable
from typing import NamedTuple

from dualdecoder.errors import ConfigError
from experiments.ruler_tasks.task import RulerSample, RulerTask

MAX_TRIES = 64
"""Most sizes tried, when doubling and again between the bounds, where 3 * 20 bisecting tries do for a million units."""


class _Trial(NamedTuple):
    size: int
    sample: RulerSample

    @property
    def tokens(self) -> int:
        return self.sample.total_tokens


def _between(fits: _Trial, over: _Trial, length: int, attempt: int) -> int:
    """Return a size strictly between two trials: interpolated, or the middle in every third attempt."""
    if attempt % 3 == 2:
        return (fits.size + over.size) // 2
    share = (length - fits.tokens) / (over.tokens - fits.tokens)
    guess = fits.size + int(share * (over.size - fits.size))
    return min(max(guess, fits.size + 1), over.size - 1)


def _grow(try_size: Callable[[int], _Trial], task: RulerTask, length: int) -> tuple[_Trial, _Trial]:
    """Double the size until the sample overflows; return the last trial that fits and the first that does not."""
    fits = try_size(task.min_size)
    if fits.tokens > length:
        raise ConfigError(
            f"length must be at least {fits.tokens} tokens to hold the smallest prompt of this sample of task "
            f"{task.name!r} and its {task.new_tokens} generated tokens, got {length}"
        )
    for _ in range(MAX_TRIES):
        over = try_size(2 * fits.size + 1)
        if over.tokens > length:
            return fits, over
        fits = over
    raise ConfigError(f"tokenizer must count more tokens for longer texts: {fits.size} units take {fits.tokens} only")


def fit(draw: Callable[[int], RulerSample], task: RulerTask, length: int) -> RulerSample:
    """Return the sample that fits `length` while the next larger haystack does not.

    Args:
        draw: makes the sample for a haystack size.  Its tokens should grow with the size; where they do not strictly,
            the result still fits, but a larger size might as well.
        task: gives the smallest size.
        length: limit in tokens, for the prompt and the generated tokens together.

    Raises:
        ConfigError: `length` is below what the smallest haystack needs, or tokens do not grow with the text.
    """

    def try_size(size: int) -> _Trial:
        return _Trial(size, draw(size))

    fits, over = _grow(try_size, task, length)
    for attempt in range(MAX_TRIES):
        if over.size - fits.size == 1:
            break
        trial = try_size(_between(fits, over, length, attempt))
        fits, over = (trial, over) if trial.tokens <= length else (fits, trial)
    return fits.sample
