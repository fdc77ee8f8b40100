"""A mean over clips, and how far it can be trusted: Student's 95 % interval, within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
FEWEST = 3  # Student's t of two values is 12.7: such an interval says nothing
ANY, POSITIVE, SHARE = (-math.inf, math.inf), (0.0, math.inf), (0.0, 1.0)  # bounds


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of `n` values, and its interval from three values on; of fewer, the values themselves.

    No values have no mean, and an infinite mean has no interval.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    values: tuple[float, ...] = ()


def interval(values: Sequence[float], bounds: tuple[float, float] = ANY) -> Interval:
    """Student's t interval of the mean, cut where the mean cannot be.

    Cutting loses nothing: what it leaves out is no possible mean. Values that rounding carried past
    a bound count as the bound. Clips are what varies: frames of one clip resemble each other too
    much to be counted singly.

    >>> interval([0.9, 1.0, 0.98], (-1, 1)).high
    1
    """
    n = len(values)
    if n == 0:
        return Interval(None, None, None, 0)
    low, high = bounds
    values = [min(max(value, low), high) for value in values]
    # A rounded sum may give a mean outside of its values.
    mean = min(max(math.fsum(values) / n, min(values)), max(values))
    if n < FEWEST:
        return Interval(mean, None, None, n, tuple(values))
    if not math.isfinite(mean):
        return Interval(mean, None, None, n)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = student(n - 1) * math.sqrt(variance / n)
    return Interval(mean, max(mean - half, low), min(mean + half, high), n)


def interval_of_next(
    values: Sequence[float], bounds: tuple[float, float] = ANY
) -> tuple[float, float] | None:
    """Where one more value is expected with 95 %, were all normally distributed; None of fewer than
    three. It is wider than that of the mean, and more values do not make it small.

    >>> interval_of_next([30.0, 35.0])
    """
    found, n = interval(values, bounds), len(values)
    if found.mean is None or found.low is None:
        return None
    variance = math.fsum((value - found.mean) ** 2 for value in values) / (n - 1)
    half = student(n - 1) * math.sqrt(variance * (1 + 1 / n))
    return max(found.mean - half, bounds[0]), min(found.mean + half, bounds[1])


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
