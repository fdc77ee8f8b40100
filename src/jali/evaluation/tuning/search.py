"""Which total to try next: a secant on what finished clips showed, inside what is known already.

Quality rises with the total and speed falls with it, so a target divides the totals in two. Wanted
is the one on the edge that still meets it: the least total for a quality, the most for a speed.
Everything here depends on the tried points alone, so a tuning that was cut goes on as it began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

LEAST, MOST = 0.05, 0.9  # totals: less is noise, and more is hardly faster than dense
START = 0.5
TRIES = 5
# How much better than the target is near enough.
NEAR = {"psnr": 0.5, "ssim": 0.01, "lpips": 0.005, "speedup": 0.05}
# Where nothing is known yet: on nano 0.02 of the work is about a dB. Else a step that can be seen.
STEP, FIRST_STEP, PER_DB = 0.3, 0.2, 0.02
SMALLEST_STEP, BEYOND = 0.05, 1.5
NARROW = 0.01  # totals that are nearer are one


class Wanted(Protocol):
    """What is asked for."""

    @property
    def metric(self) -> str: ...

    @property
    def value(self) -> float: ...


def margin(target: Wanted, value: float) -> float:
    """By how much a value is better than the target."""
    return target.value - value if target.metric == "lpips" else value - target.value


def next_total(
    points: Mapping[float, float], target: Wanted, start: float = START, tries: int = TRIES
) -> float | None:
    """The total to try after these, each with its value of the metric; None where none would help.

    >>> from jali.integration.recipe import Target
    >>> next_total({0.5: 33.0, 0.6: 37.0}, Target("psnr", 35))
    0.556
    """
    if not points:
        return min(MOST, max(LEAST, start))
    near = NEAR[target.metric]
    if len(points) >= tries or any(0 <= margin(target, v) <= near for v in points.values()):
        return None
    flips = target.metric == "speedup"  # so that more is always better
    wanted = height(target.metric, target.value)
    better = target.value + (-near if target.metric == "lpips" else near) / 2
    aim = height(target.metric, better) - wanted
    known = sorted(
        (1 - t if flips else t, height(target.metric, v) - wanted) for t, v in points.items()
    )
    low, high = (1 - MOST, 1 - LEAST) if flips else (LEAST, MOST)
    place = _place(known, aim, PER_DB if target.metric == "psnr" else None)
    if place is None:
        return None
    total = round(min(high, max(low, place)), 3)
    if any(abs(total - tried) < NARROW for tried, _ in known):
        return None
    return round(1 - total, 3) if flips else total


def height(metric: str, value: float) -> float:
    """A value as a number that is about straight over the total: errors in decibels, time for
    speed. More is better."""
    if metric == "ssim":
        return -10 * math.log10(max(1e-6, 1 - value))
    if metric == "lpips":
        return -10 * math.log10(max(1e-6, value))
    return -1 / max(1e-6, value) if metric == "speedup" else value


def _place(known: list[tuple[float, float]], aim: float, slope: float | None) -> float | None:
    """Where what rises, and is known at these places, should be at `aim`, a little above 0."""
    above = [point for point in known if point[1] >= 0]
    if not above or above[0] == known[0]:  # all are on one side: go on from the outermost
        own, other = (known[0], known[1:2]) if above else (known[-1], known[-2:-1])
        away = -1.0 if above else 1.0
        step = FIRST_STEP if slope is None else slope * abs(own[1] - aim)
        for x, y in other:
            if (own[1] - y) * (own[0] - x) > 0:
                step = abs(own[1] - aim) * (own[0] - x) / (own[1] - y)
        # Beyond the edge rather than once more before it: from there on it is between two.
        return own[0] + away * min(STEP, max(SMALLEST_STEP, BEYOND * step))
    right = above[0]
    left = max(point for point in known if point[0] < right[0])
    width = right[0] - left[0]
    if width <= 2 * NARROW:
        return None
    at = left[0] + width * (aim - left[1]) / (right[1] - left[1])
    return min(right[0] - 0.15 * width, max(left[0] + 0.15 * width, at))


def best_total(points: Mapping[float, float], target: Wanted) -> float | None:
    """The one on the edge: of those that meet the target the least, for a speed the most."""
    met = [total for total, value in points.items() if margin(target, value) >= 0]
    if not met:
        return None
    return max(met) if target.metric == "speedup" else min(met)


def nearest_total(points: Mapping[float, float], target: Wanted) -> float:
    """Where none meets it, the one that comes closest."""
    return max(points, key=lambda total: margin(target, points[total]))
