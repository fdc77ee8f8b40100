"""A mean and how far it can be trusted: Student's 95 % interval over clips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of `n` values between `low` and `high`; None where there are too few values to tell."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean. One value has a mean and no interval.

    Clips are what varies: frames of one clip resemble each other too much to be counted singly.
    """
    n = len(values)
    if n == 0:
        return Interval(None, None, None, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = student(n - 1) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)


def student(freedom: int, level: float = LEVEL) -> float:
    """The t for which Student's distribution has `level` of its mass within -t..t."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halving the angle 60 times leaves the last digit
        middle = (low + high) / 2
        if _mass_within(middle, freedom) < level:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def _mass_within(angle: float, freedom: int) -> float:
    """Mass within -t..t for t = tan(angle) sqrt(freedom): a finite sum for whole degrees of freedom
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
