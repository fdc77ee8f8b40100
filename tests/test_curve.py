"""Budgets along a run: what they add up to, and what cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jali import Budget, Curve, Entropy, Schedule
from jali.integration.modes import chosen_method
from jali.planning.site import Site
from jali.presets.method import read_method, write_method

SHAPES = st.one_of(
    st.sampled_from(["exponential", "linear", "flat"]),
    st.lists(st.floats(0.01, 10), min_size=1, max_size=6).map(tuple),
)


def mean(table):
    return sum(map(sum, table)) / (len(table) * len(table[0]))


@given(SHAPES, st.floats(0.3, 1), st.integers(2, 60), st.integers(1, 12), st.booleans())
def test_the_whole_run_costs_the_total(shape, total, steps, layers, first_dense):
    curve = Curve(total, shape)
    dense = (lambda step, _: step == 0) if first_dense else None
    beside = (1 + 0.03 * (steps - 1)) / steps  # the cost of a dense step 0 and the floor
    if first_dense and total < beside:
        with pytest.raises(ValueError, match="cannot be reached"):
            curve.budgets(steps, layers, dense)
        return
    table = curve.budgets(steps, layers, dense)
    assert mean(table) == pytest.approx(total, abs=1e-6)
    assert all(0.03 <= b <= 1 for row in table for b in row)
    if first_dense or (shape in ("exponential", "linear") and total >= beside):
        assert table[0] == (1.0,) * layers


@pytest.mark.parametrize("shape", ["exponential", "linear"])
def test_budgets_fall_from_dense(shape):
    table = [row[0] for row in Curve(0.4, shape).budgets(12, 1)]
    assert table[0] == 1
    assert table == sorted(table, reverse=True)
    assert table[-1] >= 0.03


def test_a_tuple_serves_any_number_of_steps():
    curve = Curve(0.5, (4.0, 1.0))
    for steps in (2, 3, 7, 50):
        table = [row[0] for row in curve.budgets(steps, 1)]
        assert sum(table) / steps == pytest.approx(0.5)
        assert table[0] / table[-1] == pytest.approx(4)


def test_layers_share_by_their_factors():
    table = Curve(0.4, "flat", layers=(2.0, 1.0, 1.0)).budgets(3, 3)
    assert table[0][0] == pytest.approx(2 * table[0][1])
    assert mean(table) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="the curve has 3 layers, the model 4"):
        Curve(0.4, layers=(2.0, 1.0, 1.0)).budgets(3, 4)


def test_dense_calls_are_part_of_the_total():
    table = Curve(0.5, "flat").budgets(10, 5, lambda step, layer: step < 2 or layer == 0)
    assert table[0] == (1.0,) * 5
    assert table[5][0] == 1.0
    assert mean(table) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "above 0"),
        ((1.2,), r"total must be in \[0, 1\], got 1.2"),
        ((float("nan"),), "total must be"),
        ((0.4, "exponental"), "shape must be 'exponential'"),
        ((0.4, ()), "or a tuple"),
        ((0.4, (1.0, -1.0)), "above 0, got -1.0"),
        ((0.4, (1.0, "a")), "above 0, got 'a'"),
        ((0.4, (True,)), "above 0, got True"),
        ((0.4, 0.5), "or a tuple of numbers, got 0.5"),
        ((0.4, "flat", 0.03, 2.0), "layers must be a tuple of numbers above 0, got 2.0"),
        ((0.4, "flat", 0.03, "22"), "layers must be a tuple of numbers above 0, got '22'"),
        ((0.4, "flat", 1.5), "floor must be"),
    ],
)
def test_what_is_no_curve_is_refused(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Curve(*arguments)


def test_a_total_out_of_reach_says_what_is_in_reach():
    with pytest.raises(ValueError, match=r"0\.02 cannot be reached in 12 steps.*cost 0\.030"):
        Curve(0.02).budgets(12, 8)
    with pytest.raises(ValueError, match=r"0\.05 cannot be reached in 12 steps.*cost 0\.111"):
        Curve(0.05).budgets(12, 8, lambda step, _: step == 0)


@pytest.mark.parametrize("shape", ["exponential", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_a_total_that_pays_for_no_dense_step_falls_from_less(shape, steps):
    heights = [row[0] for row in Curve(0.05, shape).budgets(steps, 1)]
    assert mean([[h] for h in heights]) == pytest.approx(0.05)
    assert heights[1:] == [0.03] * (steps - 1)
    assert heights[0] == pytest.approx(0.05 * steps - 0.03 * (steps - 1))


def test_a_schedule_follows_its_curve():
    method = Schedule(Entropy(), curve=Curve(0.4))
    assert method.total == 0.4
    found = []
    for step in range(12):
        site = Site(step, 12, 3, 8)
        dense = not method.active(site, 1000)
        found.append(1.0 if dense else method.at(site).mean_budget)
        assert method.at(Site(step, 12, 4, 8)) is method.at(site)  # layers share what is prepared
    assert sum(found) / 12 == pytest.approx(0.4)
    assert found[0] == 1
    assert method.why_dense(Site(0, 12, 3, 8), 1000) == "budget 1 in step 0"


@pytest.mark.parametrize(
    ("method", "total", "shape"),
    [
        ("entropy", 0.2, "exponential"), ("entropy", 0.549, "exponential"),
        ("entropy", 0.55, "linear"), ("entropy", 1, "linear"),
        ("rd", 0.2, "exponential"), ("rd", 0.55, "exponential"), ("rd", 1, "exponential"),
    ],
)  # fmt: skip
def test_a_high_total_falls_linearly_unless_a_curve_is_named(method, total, shape):
    def asked(curve=None):
        return chosen_method(method, None, None, None, None, {}, total=total, curve=curve)

    assert asked().curve == Curve(total, shape)
    for other in ("exponential", "linear"):
        assert asked(other).curve == Curve(total, other)


def test_a_schedule_keeps_its_own_curve_at_another_total():
    own = Schedule(Entropy(), curve=Curve(0.4, "exponential"))
    found = chosen_method(own, None, None, None, None, {}, total=0.7)
    assert found.curve == Curve(0.7, "exponential")


def test_a_total_may_be_asked_of_a_warm_up():
    method = chosen_method("entropy", None, None, None, None, {}, total=0.5, curve="flat")
    budget = method.at(Site(9, 10, 3, 8)).mean_budget
    dense = 1 - 0.8 * 7 / 8
    assert dense + (1 - dense) * budget == pytest.approx(0.5)


def test_one_of_budgets_and_curve():
    with pytest.raises(ValueError, match="budgets or a curve"):
        Schedule(Entropy(), budgets=(0.3, 0.2), curve=Curve(0.4))
    assert Schedule(Entropy(), curve=Curve(0.4)).with_budget(0.3).curve is None


def test_a_curve_is_written_and_read():
    for shape in ("linear", (3.0, 1.0)):
        method = Schedule(Entropy(Budget(0.5)), curve=Curve(0.4, shape, 0.05, (1.0, 2.0)))
        assert read_method(write_method(method), "preset") == method


def test_a_total_of_a_named_method_falls_along_the_run():
    method = chosen_method("entropy", None, None, None, None, {}, total=0.4)
    assert (method.curve, method.dense_steps, method.dense_layers) == (Curve(0.4), 0, ())


def test_a_method_keeps_its_own_curve_and_dense_calls():
    own = Schedule(Entropy(), dense_layers=(1,), curve=Curve(0.6, "linear", 0.1))
    method = chosen_method(own, None, None, None, None, {}, total=0.4)
    assert method == Schedule(Entropy(), dense_layers=(1,), curve=Curve(0.4, "linear", 0.1))
    again = chosen_method(own, None, None, None, None, {}, total=0.4, curve=(2.0, 1.0))
    assert again.curve.shape == (2.0, 1.0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"budget": 0.3, "total": 0.4}, "mean_budget and total"),
        ({"curve": "linear"}, "give total= too"),
        ({"asked": "dense", "total": 0.4}, "dense costs 1"),
        ({"total": 1.4}, r"total must be in \[0, 1\], got 1.4"),
    ],
)
def test_what_does_not_go_together_is_refused(more, words):
    arguments = {"asked": "entropy", "budget": None, "warmup": None, "first_layer": None}
    with pytest.raises(ValueError, match=words):
        chosen_method(**{**arguments, "model": None, "options": {}, **more})
