"""Places, and what is said of them: ties, controls, rows that did more, arenas that were cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from jali.evaluation.arena.leaderboard import Leaderboard, plus_minus
from jali.evaluation.arena.record import DenseTimes, Record, Results
from jali.evaluation.arena.row import Row, read_method_spec, read_schedule
from jali.evaluation.quality.interval import Interval, interval

PROMPTS = tuple(f"prompt {number}" for number in range(6))


def record(method: str, psnr: Sequence[float], first: int = 0, **more: Any) -> Record:
    usual: dict[str, Any] = {
        "schedule": "exponential", "total": 0.4, "session": 0, "achieved": 0.4, "planning": 0.01,
        "seconds": 2.0, "metrics": {"psnr": tuple(psnr)},
    }  # fmt: skip
    return Record(method=method, first=first, **usual | more)


def board(*records: Record, batch: int = 6, dense: Sequence[DenseTimes] = (), **more: Any) -> Any:
    results = Results(
        settings={"model": "nano", "steps": 12}, prompts=PROMPTS[: more.pop("prompts", 6)],
        batch=batch, machine={}, versions={}, jali="0", dense=tuple(dense), records=records, **more,
    )  # fmt: skip
    return Leaderboard.of(results)


def places(found: Any) -> Mapping[str, int]:
    return {s.row.label: s.place for s in found.boards[0].standings}


FIRST = (40.0, 30.0, 35.0, 45.0, 38.0, 33.0)  # clips differ far more than methods do


def less(by: float, jitter: float = 0.1) -> list[float]:
    return [x - by + jitter * (-1) ** i for i, x in enumerate(FIRST)]


def test_differences_are_paired_so_that_hard_clips_hide_nothing() -> None:
    found = board(
        record("local", less(5)), record("psa", less(1)), record("rd", FIRST),
        record("entropy", less(0.01)), record("random", less(7)),
    )  # fmt: skip
    assert places(found) == {"rd": 1, "entropy": 2, "psa": 3, "local": 4, "random": 5}
    rd, entropy, psa, local, _ = found.boards[0].standings
    assert rd.behind is None
    assert psa.behind.mean == pytest.approx(-1)
    assert not psa.is_tied  # although its own interval overlaps that of the first by far
    assert psa.metrics["psnr"].high > rd.metrics["psnr"].low
    assert entropy.is_tied
    assert psa.ahead.mean == pytest.approx(4)
    assert local.ahead is None
    assert found.boards[0].sentences() == [
        "At 0.4 (exponential) rd is first with 36.8 dB; not told apart from it: entropy.",
        "At 0.4 (exponential) every method beats both controls.",
    ]


def test_what_loses_to_a_control_is_said() -> None:
    found = board(
        record("rd", FIRST), record("local", less(2)), record("psa", less(3)),
        record("rf_v2", less(2, 2)), record("random", less(9)),
    )  # fmt: skip
    standings = {s.row.label: s for s in found.boards[0].standings}
    assert standings["psa"].loses
    assert not standings["rf_v2"].loses
    assert standings["rf_v2"].is_open
    said = found.boards[0].sentences()
    assert said[1] == "At 0.4 (exponential) these lose to the control local: psa (−1.0 ± 0.0 dB)."
    assert "these are not told apart from the control local: rf_v2 (" in said[2]


def test_a_row_that_did_more_than_its_total_has_no_place() -> None:
    found = board(
        record("rd", less(9), achieved=0.402), record("psa", FIRST, achieved=0.41),
        record("random", less(10)), record("local", less(8), achieved=0.5),
    )  # fmt: skip
    assert places(found) == {"rd": 1, "random": 2, "psa": 0, "local": 0}
    assert found.boards[0].control.row.label == "random"
    assert any(
        "more work than that and have no place: psa (0.410), local (0.500)" in sentence
        for sentence in found.sentences()
    )
    # One that did less has its place and its mark.
    (rd, *_) = (
        board(record("rd", FIRST, achieved=0.39), record("random", less(1))).boards[0].standings
    )
    assert (rd.place, rd.is_off) == (1, True)


def test_a_cut_arena_compares_on_the_prompts_that_all_rows_have() -> None:
    rows = [record(m, FIRST[:2]) for m in ("rd", "random", "local")]
    later = [record("rd", [90.0, 90.0], first=2)]
    found = board(*rows, *later, batch=2)
    assert found.boards[0].prompts == 2
    assert all(s.psnr == 35.0 for s in found.boards[0].standings)
    assert not found.is_complete
    # Two clips have no interval.
    assert "2 prompts cannot tell rows apart: it takes 3" in found.sentences()[0]
    assert len(found.sentences()) == 1
    found = board(record("rd", [30.0]), record("psa", [28.0]), record("random", [29.0]), prompts=1)
    assert not any(s.loses for s in found.boards[0].standings)
    said = found.sentences()[1]
    assert said.endswith("these have a lower PSNR than the control random: psa (−1.0 dB).")


def test_rows_that_were_asked_for_and_not_made_are_named() -> None:
    found = board(record("rd", FIRST))
    asked = [
        Row(read_method_spec(m), read_schedule("graded"), total)
        for total in (0.4, 0.3)
        for m in ("rd", "psa")
    ]
    found = Leaderboard.of(found.results, asked)
    assert found.missing == ("psa exponential 0.4", "rd exponential 0.3", "psa exponential 0.3")
    assert not found.is_complete
    assert len(found.boards) == 1


def test_speed_ups_are_over_the_dense_runs_of_their_own_session() -> None:
    rows = [
        record("rd", FIRST[:2], first=first, session=session, seconds_transformer=1.0)
        for first, session in ((0, 0), (2, 1), (4, 1))
    ]
    times = [
        DenseTimes(0, 0, (4.0, 6.0), (3.0,)),
        DenseTimes(0, 1, (100.0,)),  # of a session that made no row of this group
        DenseTimes(2, 1, (6.0,), (3.0,)),
        DenseTimes(4, 1, (8.0,), (3.0,)),
    ]
    (standing,) = board(*rows, batch=2, dense=times).boards[0].standings
    assert standing.speed_up == interval([2.5, 3.0, 4.0], (0, 1e9))
    assert standing.speed_up_transformer.mean == 3
    (standing,) = board(*rows[:1], batch=2, dense=times).boards[0].standings
    assert standing.speed_up == Interval(2.5, None, None, 1, (2.0, 3.0))
    assert plus_minus(standing.speed_up, 1) == "2.5 2.0 – 3.0"
    (standing,) = board(*rows[:1], batch=2).boards[0].standings
    assert standing.speed_up is None


def test_its_words_and_plain_values() -> None:
    published = record("sol", FIRST, schedule="as published", total=None, achieved=0.7)
    found = board(record("rd", FIRST), published, unavailable={"lpips": "no weights"})
    assert [one.title for one in found.boards] == ["0.4 of all work, exponential", "as published"]
    text = str(found)
    assert " 1  rd" in text
    assert "LPIPS (Alex) was not measured: no weights." in text
    plain = found.to_dict()
    (row,) = plain["boards"][1]["rows"]
    assert (row["method"], row["total"]) == ("sol", None)
    assert row["achieved"] == pytest.approx(0.7)
    assert plain["boards"][0]["rows"][0]["metrics"]["psnr"]["mean"] == pytest.approx(
        36.83, abs=0.01
    )
