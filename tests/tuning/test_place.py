"""Places of a run, and work that is moved between them at an equal total."""

from __future__ import annotations

import math

import pytest

from jali.evaluation.arena.row import ScheduleSpec, read_schedule
from jali.evaluation.tuning.place import MORE, Gain, Place, gain_of, moved, places, powers_of
from jali.planning.curve import mean


@pytest.mark.parametrize(
    ("probes", "steps", "layers"), [(12, 12, 8), (12, 50, 40), (6, 3, 2), (4, 1, 9)]
)
def test_places_cover_every_step_and_layer_once(probes: int, steps: int, layers: int) -> None:
    found = places(probes, steps, layers)
    assert len(found) <= probes
    for kind, count in (("steps", steps), ("layers", layers)):
        own = [place for place in found if place.kind == kind]
        if own:
            covered = [number for place in own for number in range(place.first, place.end)]
            assert covered == list(range(count))
            assert len(own) > 1
    assert any(place.kind == "layers" for place in found)


def test_no_probes_are_no_places() -> None:
    assert places(0, 12, 8) == []
    assert [str(place) for place in places(4, 12, 2)] == [
        "steps 0 to 5", "steps 6 to 11", "layer 0", "layer 1",
    ]  # fmt: skip


def test_a_move_keeps_the_total_and_reads_back() -> None:
    base = ScheduleSpec("exponential")
    here = {Place("layers", 1, 2): 1.0, Place("steps", 3, 6): -0.5}
    spread = moved(base, 0.4, 12, 4, here)
    assert read_schedule(str(spread)) == spread
    table = spread.curve(0.4).budgets(12, 4)
    assert mean(table) == pytest.approx(0.4, abs=1e-6)
    before = base.curve(0.4).budgets(12, 4)
    ratio = [[a / b for a, b in zip(x, y, strict=True)] for x, y in zip(table, before, strict=True)]
    assert ratio[7][1] / ratio[7][0] == pytest.approx(MORE, rel=1e-3)
    assert ratio[4][0] / ratio[7][0] == pytest.approx(MORE**-0.5, rel=1e-3)
    # Nothing moved is the same table, and a move of what was moved goes on from there.
    same = moved(base, 0.4, 12, 4, {})
    assert same.layers == ()
    assert same.curve(0.4).budgets(12, 4)[5][0] == pytest.approx(before[5][0], rel=1e-3)
    again = moved(spread, 0.4, 12, 4, {Place("layers", 1, 2): 1.0})
    assert again.layers[1] == pytest.approx(MORE**2, rel=1e-3)


def test_work_goes_to_where_more_is_gained() -> None:
    gains = {
        Place("layers", 0, 1): Gain(0.8, 0.1), Place("layers", 1, 2): Gain(-0.4, 0.1),
        Place("steps", 0, 6): Gain(0.1, 0.5), Place("steps", 6, 12): Gain(0.1, 0.5),
    }  # fmt: skip
    powers = powers_of(gains, 1.0)
    first, second, *steps = powers.values()
    assert first == pytest.approx(1.0)
    assert second == pytest.approx(-1.0)
    assert steps == [0, 0]  # as much everywhere is no move
    assert powers_of({place: Gain(0.0, 0.1) for place in gains}, 1.0) == {}


def test_what_is_uncertain_counts_for_little() -> None:
    assert Gain(1.0, 0.0).trusted == 1
    assert Gain(1.0, 1.0).trusted == 0.5
    assert Gain(1.0, math.inf).trusted == 0
    assert Gain(0.0, 0.0).trusted == 0
    assert gain_of([1.0, 3.0]) == Gain(2.0, 1.0)
    assert gain_of([1.0]).error == math.inf
