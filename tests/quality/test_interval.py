"""Student's interval against the printed tables, and against chance."""

from __future__ import annotations

import random

import pytest

from jali.evaluation.quality.interval import Interval, interval, student

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
    assert interval([3.0]) == Interval(3.0, None, None, 1)
    assert interval([2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 2)


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
