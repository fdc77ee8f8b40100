"""Totals of replayed runs: what a curve makes of a book, and of one that holds few budgets."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import books
import pytest
import tiny

import jali
from jali import Curve
from jali.generation import Settings
from jali.integration.models.registry import model_card
from jali.maskbook import MaskBook
from jali.maskbook.calibration import calibrate
from jali.maskbook.curve import BookCurve
from jali.maskbook.mode import book_method
from jali.methods import Schedule
from jali.planning.curve import mean
from jali.tokens.layout import Blocks

CALL = {**tiny.WAN_CALL, "height": 128, "width": 128, "num_frames": 9}  # 3×8×8 tokens
RECORD = {k: v for k, v in CALL.items() if k != "prompt"}
STEPS = 4


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan()


@pytest.fixture(scope="module", params=[True, False], ids=["importance", "few budgets"])
def book(request: Any, pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> MaskBook:
    file = tmp_path_factory.mktemp("book") / "wan.safetensors"
    given = {"steps": STEPS, "blocks": Blocks(8, 8), "budgets": (0.2, 0.4, 0.6, 0.8)}
    return calibrate(pipe, ["a cat"], file, importance=request.param, **given, **RECORD)


@pytest.mark.parametrize("curve", [None, "linear", "flat", (4.0, 2.0, 1.0)])
@pytest.mark.parametrize("total", [0.55, 0.7])
def test_a_run_costs_its_total(pipe: Any, book: MaskBook, total: float, curve: Any) -> None:
    bare = {"warmup_frac": 0, "dense_first_layer": False}
    with jali.cached_processor_mode(pipe, book, total=total, curve=curve, **bare) as handle:
        tiny.generate(pipe, CALL, steps=STEPS)
    stats = handle.stats()
    assert stats.total == total
    assert f"asked {total:.2f} in total" in handle.summary()
    by_step = [cost for _, cost in sorted(stats.by("step").items())]
    assert by_step == sorted(by_step, reverse=True)
    if book.header.importance:
        assert stats.cost == pytest.approx(total, abs=0.02)
        assert "gives" not in handle.summary()
    else:  # a step more of the next budget would be too much
        assert total - 0.2 / STEPS - 0.01 <= stats.cost <= total
        assert f"which holds the budgets 0.2, 0.4, 0.6, 0.8, gives {stats.cost:.3f}" in (
            handle.summary()
        )


def test_a_curve_asks_each_step_for_its_own(pipe: Any, book: MaskBook) -> None:
    """What is replayed are the book's own plans of that step's budget."""
    seen: list[Any] = []
    with jali.cached_processor_mode(pipe, book, total=0.5) as handle:
        handle.run.watch = seen.append
        tiny.generate(pipe, CALL, steps=STEPS)
        method = handle.method
    asked = set()
    for call in seen:
        if call.result.plan is None:
            continue
        budget = method.at(call.site).mean_budget
        asked.add(budget)
        want = book.plan(budget, call.site.step, call.site.layer)
        assert (call.result.plan.levels == want.levels).all()
    assert len(asked) >= 2


def test_only_what_a_run_asks_for_is_derived(
    pipe: Any, book: MaskBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jali.maskbook import book as module

    calls = []
    real = module.keep_bits
    monkeypatch.setattr(module, "keep_bits", lambda *a: calls.append(1) or real(*a))
    opened = MaskBook.open(book.path)
    with jali.cached_processor_mode(pipe, opened, total=0.53) as handle:
        before = len(calls)
        tiny.generate(pipe, CALL, steps=STEPS)
    assert len(calls) == before
    sparse = {row.step for row in handle.stats().rows if row.reason is None}
    assert before == (3 * len(sparse) if book.header.importance else 0)


@pytest.fixture(scope="module")
def few() -> MaskBook:
    return books.make(None, importance=False, budgets=(0.2, 0.4, 0.7))


class TestFewBudgets:
    """The budgets that a book holds, against every way to lay them along a run."""

    @pytest.mark.parametrize("total", [0.35, 0.45, 0.6, 0.8, 0.95])
    def test_flat_is_the_best_that_falls(self, few: MaskBook, total: float) -> None:
        curve = BookCurve(total, "flat", book=few)
        found = curve.budgets(few.steps, few.layers)
        rows = [row[0] for row in found]
        assert all(len(set(row)) == 1 for row in found)
        assert rows == sorted(rows, reverse=True)
        two = [
            curve.cost(tuple((x,) * few.layers for x in (*[a] * n, *[b] * (few.steps - n))))
            for (b, a), n in itertools.product(
                itertools.pairwise((*few.budgets, 1.0)), range(few.steps + 1)
            )
        ]
        assert curve.cost(found) == pytest.approx(max(cost for cost in two if cost <= total))

    @pytest.mark.parametrize("shape", ["exponential", "linear", "flat", (3.0, 1.0)])
    def test_more_is_never_less(self, few: MaskBook, shape: Any) -> None:
        tables = []
        for total in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            curve = BookCurve(total, shape, book=few)
            tables.append(curve.budgets(few.steps, few.layers))
            assert curve.cost(tables[-1]) <= total + 1e-9
        for less, more in itertools.pairwise(tables):
            assert mean(less) <= mean(more)
        assert mean(tables[-1]) == 1.0

    def test_what_cannot_be_made_names_what_there_is(self, few: MaskBook, pipe: Any) -> None:
        with pytest.raises(ValueError, match=r"total of 0\.3 .* 0\.2, 0\.4, 0\.7: .* ask for more"):
            book_method(few, None, 0.3, None, 1, None)
        with (
            pytest.raises(ValueError, match="two ways"),
            jali.cached_processor_mode(pipe, few, 0.5, total=0.5),
        ):
            pass
        with (
            pytest.raises(ValueError, match="give total="),
            jali.cached_processor_mode(pipe, few, curve="flat"),
        ):
            pass

    def test_a_usual_book_keeps_the_curve_as_it_is(self) -> None:
        made = book_method(books.make(None), None, 0.5, "linear", 0, True)
        assert isinstance(made, Schedule)
        assert made.curve == Curve(0.5, "linear")
        assert made.dense_layers == (0,)


class TestSettings:
    def test_a_book_with_a_total(self, tmp_path: Path) -> None:
        file = tmp_path / "a.safetensors"
        books.make(file, model="nano", importance=False)
        settings = Settings("nano", masks=str(file), total=0.6, curve="flat").resolve()
        assert (settings.total, settings.curve, settings.budget) == (0.6, "flat", None)
        assert settings.warmup_frac == 0.2
        assert settings.attention is not None
        assert settings.attention["schedule"]["curve"]["total"] == 0.6
        again = Settings.from_dict(json.loads(json.dumps(settings.to_dict()))).resolve()
        assert not again.differences(settings)
        of_rd = tmp_path / "rd.safetensors"
        books.make_errors(of_rd, model="nano")
        assert Settings("nano", masks=str(file)).resolve().steps == 4
        for steps in (None, 7):  # which serves any number of them
            found = Settings("nano", masks=str(of_rd), total=0.4, steps=steps).resolve()
            assert found.steps == (steps or model_card("nano").steps)
            assert found.curve == "exponential"
        probed = Settings("nano", masks=str(file), total=0.6, options={"probes": 16}).resolve()
        assert probed.make_method().probes == 16
        assert probed.differences(settings)
        again = Settings.from_dict(json.loads(json.dumps(probed.to_dict()))).resolve()
        assert not again.differences(probed)
        with pytest.raises(ValueError, match="cached has the option probes, got samples"):
            Settings("nano", masks=str(file), options={"samples": 8, "probes": 16}).check()
        for wrong in ("many", -1, 8, 0.5, True):
            with pytest.raises((ValueError, TypeError), match=f"probes must be .* got {wrong!r}"):
                Settings("nano", masks=str(file), options={"probes": wrong}).resolve()
        with pytest.raises(ValueError, match=r"for 4 steps, and 7 are asked for"):
            Settings("nano", masks=str(file), steps=7).resolve()
        with pytest.raises(ValueError, match=r"cannot be made of the budgets .* 0\.3, 0\.5"):
            Settings("nano", masks=str(file), total=0.2).resolve()
