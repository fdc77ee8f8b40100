"""Student's interval against the printed tables, against chance, and within its bounds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jali.evaluation.quality.interval import POSITIVE, Interval, interval, student
from jali.evaluation.quality.measure import MEASURES

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045,
         30: 2.042, 100: 1.984, 1000: 1.962}  # fmt: skip


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_table(freedom: int) -> None:
    assert student(freedom) == pytest.approx(TABLE[freedom], abs=6e-4)


def test_other_levels() -> None:
    assert student(5, 0.99) == pytest.approx(4.032, abs=6e-4)
    assert student(8, 0.90) == pytest.approx(1.860, abs=6e-4)


def test_few_values() -> None:
    assert interval([]) == Interval(None, None, None, 0)
    assert interval([3.0]) == Interval(3.0, None, None, 1, (3.0,))
    assert interval([2.0, 3.0]) == Interval(2.5, None, None, 2, (2.0, 3.0))
    assert interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 3)


def test_what_is_infinite_has_no_interval() -> None:
    assert interval([math.inf] * 4) == Interval(math.inf, None, None, 4)


def test_clips_that_differ_much_stay_what_a_metric_can_be() -> None:
    ssim = interval([0.25, 0.95, 0.99], MEASURES["ssim"].bounds)
    assert (ssim.low, ssim.high) == (pytest.approx(-0.3, abs=0.03), 1.0)
    vmaf = interval([20.0, 90.0, 95.0], MEASURES["vmaf"].bounds)
    assert (vmaf.low, vmaf.high) == (0.0, 100.0)
    assert interval([1.0000001, 1.0, 1.0], MEASURES["ssim"].bounds).mean == 1.0


def values_of(bounds: tuple[float, float]) -> st.SearchStrategy[list[float]]:
    low, high = (min(max(end, -1e6), 1e6) for end in bounds)
    return st.lists(st.floats(low, high), min_size=3, max_size=12)


@given(
    st.one_of(st.tuples(st.just(own.bounds), values_of(own.bounds)) for own in MEASURES.values()),
    st.integers(2, 5),
)
def test_it_stays_inside_holds_the_mean_and_shrinks(
    drawn: tuple[tuple[float, float], list[float]], times: int
) -> None:
    bounds, values = drawn
    few, many = interval(values, bounds), interval(values * times, bounds)
    for found in (few, many):
        assert found.low is not None
        assert found.high is not None
        assert bounds[0] <= found.low <= found.mean <= found.high <= bounds[1]
        assert found.values == ()
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert many.mean == pytest.approx(few.mean, abs=slack)
    assert few.low - slack <= many.low
    assert many.high <= few.high + slack


def test_times_are_never_negative() -> None:
    assert interval([0.1, 9.0, 0.2], POSITIVE).low == 0


def test_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high == pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-3)
    assert found.low == pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-3)


def test_nineteen_of_twenty_intervals_hold_the_mean() -> None:
    chance = random.Random(0)
    found = [interval([chance.gauss(5, 2) for _ in range(4)]) for _ in range(4000)]
    inside = sum((one.low or 0) <= 5 <= (one.high or 0) for one in found) / len(found)
    assert inside == pytest.approx(0.95, abs=0.012)
