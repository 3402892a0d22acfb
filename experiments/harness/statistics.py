"""Intervals for reported means."""

from collections.abc import Sequence
from math import sqrt
from random import Random

# Two-sided 95 % quantile of the normal distribution.
Z95 = 1.959964


def wilson_interval(score: float, samples: int) -> list[float]:
    """95 % Wilson score interval ``[low, high]`` of a mean score in 0 to 100.

    It takes each sample for all or nothing.
    """
    p, z2 = score / 100, Z95**2
    centre = (p + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z95 / (1 + z2 / samples) * sqrt(p * (1 - p) / samples + z2 / (4 * samples**2))
    return [100 * max(0.0, centre - half), 100 * min(1.0, centre + half)]


BOOTSTRAP_SAMPLES = 2000


def mean_interval(scores: Sequence[float]) -> tuple[str, list[float]]:
    """Kind and 95 % interval ``[low, high]`` of the mean of scores in 0 to 100.

    ``wilson`` where every score is 0 or 100, and where all are equal, of which a bootstrap would say nothing;
    ``bootstrap`` (percentiles of seeded resamples) where samples have partial credit.
    """
    mean = sum(scores) / len(scores)
    if len(set(scores)) == 1 or set(scores) <= {0, 100}:
        return "wilson", wilson_interval(mean, len(scores))
    rng = Random(0)
    means = sorted(sum(rng.choices(scores, k=len(scores))) / len(scores) for _ in range(BOOTSTRAP_SAMPLES))
    tail = round(0.025 * BOOTSTRAP_SAMPLES)
    return "bootstrap", [means[tail], means[-1 - tail]]
