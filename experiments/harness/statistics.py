"""Intervals for reported means."""

from math import sqrt

# Two-sided 95 % quantile of the normal distribution.
Z95 = 1.959964


def wilson_interval(score: float, samples: int) -> list[float]:
    """95 % Wilson score interval ``[low, high]`` of a mean score in 0 to 100.

    It takes each sample for all or nothing; samples with partial credit vary less, so for them it is wide.
    """
    p, z2 = score / 100, Z95**2
    centre = (p + z2 / (2 * samples)) / (1 + z2 / samples)
    half = Z95 / (1 + z2 / samples) * sqrt(p * (1 - p) / samples + z2 / (4 * samples**2))
    return [100 * max(0.0, centre - half), 100 * min(1.0, centre + half)]
