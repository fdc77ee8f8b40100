"""Who takes part: methods, schedules and rows by their words, and totals that are met."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from jali.error import InputError
from jali.evaluation.arena.match import TRIES, UnreachableError, corrected, matched
from jali.evaluation.arena.row import (
    MethodSpec,
    Row,
    make_rows,
    read_method_spec,
    read_schedule,
    read_schedules,
    split_methods,
)
from jali.methods import METHODS


def test_all_is_every_method_that_is_registered_but_dense() -> None:
    assert split_methods("all") == [name for name in METHODS if name != "dense"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("entropy,rd", ["entropy", "rd"]),
        ("entropy rd", ["entropy", "rd"]),
        ("rd:samples=4,keep=0.25,psa", ["rd:samples=4,keep=0.25", "psa"]),
        ("rd:levels=(8,'mean','skip'),entropy", ["rd:levels=(8,'mean','skip')", "entropy"]),
        ("entropy,entropy", ["entropy"]),
    ],
)
def test_methods_between_commas_keep_their_options(text: str, words: list[str]) -> None:
    assert split_methods(text) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("graded", ["exponential"]),
        ("graded,esa", ["exponential", "esa"]),
        ("exponential,graded", ["exponential"]),
        ("linear@.05", ["linear@0.05"]),
        ("1,.5,.2 flat", ["1,0.5,0.2", "flat"]),
        ("linear*1,.8@.05,esa 1,.5*2,1", ["linear*1,0.8@0.05", "esa", "1,0.5*2,1"]),
    ],
)
def test_schedules_are_written_in_one_way(text: str, said: list[str]) -> None:
    assert [str(one) for one in read_schedules(text)] == said


@pytest.mark.parametrize(
    "text", ["grade", "1,0", "graded@2", "graded@x", "1,,2", "nan", "flat*", "flat*1,0"]
)
def test_a_schedule_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="schedule: "):
        read_schedules(text)


def test_rows_hold_both_controls_and_thresholds_once_more_as_published() -> None:
    methods = [read_method_spec(word) for word in ("entropy", "sol", "random:seed=3")]
    rows = make_rows(methods, [read_schedule("graded"), read_schedule("esa")], [0.5, 0.4])
    assert len(rows) == 2 * 2 * 4 + 1
    names = [str(row) for row in rows]
    assert "local exponential 0.5" in names
    assert "random:seed=3 esa 0.4" in names  # a control with options stands for itself
    assert "random esa 0.4" not in names
    assert names[-1] == "sol as published"
    assert len({row.folder for row in rows}) == len(rows)
    assert all(re.fullmatch(r"[a-z0-9.-]+", row.folder) for row in rows)


@pytest.mark.parametrize(
    ("name", "steps", "layers"),
    [
        ("ada_bsa", 0.2, (0,)),  # that of ESA
        ("draft", 0.3, (0,)),
        ("mass", 3, ()),
        ("radial", 0.24, (0,)),
        ("sol", 0.2, (0, 1)),
        ("sparge", 0, ()),
        ("sta", 0.24, ()),
        ("svg", 0.3, (0,)),
        ("svg2", 0.3, (0,)),
    ],
)
def test_as_published_means_a_schedule_of_its_own_or_that_of_esa(
    name: str, steps: float, layers: tuple[int, ...]
) -> None:
    (row,) = (row for row in make_rows([MethodSpec(name)], [], []) if row.schedule is None)
    made = row.scheduled(None)
    assert (made.dense_steps, made.dense_layers, made.curve) == (steps, layers, None)
    assert made.inner == METHODS[name]()


def test_a_method_with_a_budget_and_no_schedule_of_its_own_has_no_row_as_published() -> None:
    assert not make_rows([MethodSpec(name) for name in ("entropy", "rd", "local")], [], [])


def test_a_row_is_read_back_from_its_words() -> None:
    row = Row(read_method_spec("rd:samples=4,keep=0.25"), read_schedule("linear@.05"), 0.4)
    again = Row(read_method_spec(row.label), read_schedule(row.spread), row.total)
    assert again == row
    assert str(row) == "rd:keep=0.25,samples=4 linear@0.05 0.4"


def test_every_registered_method_can_be_spread_over_a_run() -> None:
    """With what `all` brings in, also later."""
    for name in METHODS:
        if name != "dense":
            row = Row(MethodSpec(name), read_schedule("graded"), 0.4)
            assert row.scheduled(0.4).total == 0.4, name


@dataclass(frozen=True)
class Ran:
    cost: float


def test_what_is_asked_follows_the_secant() -> None:
    assert corrected([(0.4, 0.45)], 0.4) == pytest.approx(0.35)
    assert corrected([(0.4, 0.45), (0.35, 0.42)], 0.4) == pytest.approx(0.35 - 0.02 * 5 / 3)
    assert corrected([(0.4, 0.468), (0.332, 0.468)], 0.4) == 0.4  # asked already: no more tries
    assert corrected([(0.9, 0.5)], 0.8) == 1.0


def test_the_nearest_of_a_few_tries_counts() -> None:
    made, tries = matched(0.4, lambda asked: Ran(0.8 * asked + 0.15))
    assert made.cost == pytest.approx(0.4, abs=0.005)
    assert tries[0] == (pytest.approx(0.3125, abs=0.01), made.cost)
    made, tries = matched(0.4, lambda asked: Ran(round(asked * 4) / 4))
    assert made.cost == 0.5  # in quarters it cannot be had nearer
    assert len(tries) <= TRIES
    made, tries = matched(0.4, lambda asked: Ran(asked), first=0.398)
    assert tries == [(0.398, 0.398)]


def test_only_a_correction_may_be_past_what_a_schedule_can_have() -> None:
    def make(asked: float) -> Ran:
        read_schedule("esa").check(asked, 10)
        return Ran(asked + 0.3)

    made, tries = matched(0.4, make)
    assert (made.cost, len(tries)) == (0.7, 1)
    with pytest.raises(UnreachableError, match=r"schedule esa: a total of 0\.1 cannot be reached"):
        matched(0.1, make)
    # Any other mistake of a run is none of a total.
    with pytest.raises(ValueError, match="invalid literal"):
        matched(0.4, lambda _: Ran(int("x")))
