"""The search for a total: on the edge in a few tries, whatever the metric, and never astray."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from jali.evaluation.quality.interval import interval, interval_of_next
from jali.evaluation.tuning.search import (
    LEAST,
    MOST,
    NEAR,
    TRIES,
    best_total,
    margin,
    nearest_total,
    next_total,
)
from jali.integration.recipe import Target


def run(value: Callable[[float], float], target: Target, start: float = 0.5) -> dict[float, float]:
    points: dict[float, float] = {}
    while (total := next_total(points, target, start)) is not None:
        assert LEAST <= total <= MOST
        assert total not in points
        points[total] = value(total)
    return points


CURVES: dict[str, Callable[[float], float]] = {
    "psnr": lambda t: 20 + 40 * t + 6 * t**3,
    "ssim": lambda t: 1 - 0.4 * math.exp(-4 * t),
    "lpips": lambda t: 0.5 * math.exp(-5 * t),
    "speedup": lambda t: 1 / (0.3 + 0.7 * t),
}


@pytest.mark.parametrize("start", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(
    ("metric", "value"),
    [(m, v) for m, values in {
        "psnr": (26, 30, 35, 40, 48), "ssim": (0.8, 0.9, 0.97), "lpips": (0.2, 0.05, 0.01),
        "speedup": (1.2, 1.6, 2.3)}.items() for v in values],
)  # fmt: skip
def test_the_edge_is_found_in_a_few_tries(metric: str, value: float, start: float) -> None:
    target, curve = Target(metric, value), CURVES[metric]
    points = run(curve, target, start)
    assert len(points) <= TRIES
    best = best_total(points, target)
    assert best is not None
    assert target.is_met(points[best])
    # Twice what is near, since the last of five tries may end there; or totals that are as good as
    # the same: a little further on the target is not met.
    further = curve(best + (0.025 if metric == "speedup" else -0.025))
    assert margin(target, points[best]) <= 2 * NEAR[metric] or not target.is_met(further)


@pytest.mark.parametrize(
    ("metric", "value", "end"), [("psnr", 90, MOST), ("speedup", 9, LEAST), ("lpips", 0, MOST)]
)
def test_what_cannot_be_met_is_left_after_the_end_was_tried(
    metric: str, value: float, end: float
) -> None:
    target = Target(metric, value)
    points = run(CURVES[metric], target)
    assert best_total(points, target) is None
    assert nearest_total(points, target) == end


@pytest.mark.parametrize("metric", CURVES)
def test_what_is_met_everywhere_ends_at_the_other_end(metric: str) -> None:
    target = Target(metric, 0.9 if metric == "lpips" else 0.1)
    points = run(CURVES[metric], target)
    assert best_total(points, target) == (MOST if metric == "speedup" else LEAST)


def test_noise_leads_nowhere_else() -> None:
    """Values that do not rise still end, inside the bounds, at one that meets the target."""
    for seed in range(50):

        def noisy(t: float, seed: int = seed) -> float:
            return 20 + 30 * t + 4 * math.sin(1000 * t + seed)

        points = run(noisy, Target("psnr", 33))
        assert len(points) <= TRIES
        best = best_total(points, Target("psnr", 33))
        assert best is None or points[best] >= 33


def test_the_next_try_depends_on_the_points_alone() -> None:
    target = Target("psnr", 35)
    points = run(CURVES["psnr"], target)
    seen: dict[float, float] = {}
    for total, value in points.items():
        assert next_total(seen, target) == total
        seen = dict(reversed([*seen.items(), (total, value)]))


def test_one_more_clip_is_less_certain_than_the_mean() -> None:
    values = [30.0, 33.0, 36.0, 31.0]
    mean, more = interval(values), interval_of_next(values)
    assert more is not None
    assert mean.low is not None
    assert more[0] < mean.low < 32.5 < more[1]
    # Student's t of 3 degrees is 3.1824, the deviation 2.6458.
    assert more[1] - 32.5 == pytest.approx(3.1824 * 2.6458 * math.sqrt(1.25), rel=1e-4)
    assert interval_of_next(values[:2]) is None
    assert interval_of_next([0.9, 1.0, 0.95], (0, 1)) == pytest.approx((0.7015, 1.0), abs=1e-3)
