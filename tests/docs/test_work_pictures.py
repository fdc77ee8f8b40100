"""The pictures of where the work should go show what the library does and what was measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from docs import work_pictures
from jali import Curve, RateDistortion, Schedule, Site, load_preset
from jali.methods import METHODS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/quality-per-work.md").read_text("utf-8")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(work_pictures.RESULT.read_text("utf-8"))
    return found


def test_every_measured_method_has_a_line_of_all_budgets(told: dict[str, Any]) -> None:
    (axis,) = work_pictures.errors_figure(told).axes
    drawn = {line.get_label(): line.get_xydata() for line in axis.lines}
    first = {"entropy", "rd", "psa", "rf_v2", "ada_bsa", "random", "local"}
    assert first <= {name.partition(",")[0] for name in drawn} <= set(METHODS)
    assert set(drawn) == {row["method"] for row in told["rows"]}  # what was measured
    for name, points in drawn.items():
        rows = [row for row in told["rows"] if row["method"] == name]
        assert [row["budget"] for row in rows] == list(work_pictures.BUDGETS)
        assert points.tolist() == [[row["cost"], row["error"]] for row in rows]


def test_the_line_of_the_price_touches_what_is_taken(told: dict[str, Any]) -> None:
    head = told["one_head"]
    work = work_pictures.work_of(head["levels"], told["block"])
    assert work == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / told["block"], 0])
    shown = work_pictures.pairs(told)
    assert len(shown) == len(head["levels"])  # every level is taken somewhere
    for place, m, n in shown:
        points = list(zip(work, [0.0, *head["errors"][m][n]], strict=True))
        paid = [x + y for x, y in points]
        assert paid[place] == min(paid)
        assert points[place] in work_pictures.hull(points)
    assert len(work_pictures.price_figure(told).axes) == len(shown)


def test_the_maps_are_of_the_levels_that_the_price_takes(told: dict[str, Any]) -> None:
    """But for one step of a code: errors are kept in bytes, and spread inside them."""
    head = told["one_head"]
    plan = head["plans"][str(work_pictures.SHOWN[0])]
    work = work_pictures.work_of(head["levels"], told["block"])
    for m, row in enumerate(plan):
        for n, level in enumerate(row):
            error = [0.0, *head["errors"][m][n]]
            least = min(e * 2**-0.25 + w for e, w in zip(error, work, strict=True))
            place = head["levels"].index(level)
            assert m == n or error[place] * 2**-0.25 + work[place] <= least * 2**0.25 + 0.01
    assert work_pictures.maps_figure(told).axes


def test_a_hull_has_the_points_that_some_price_makes_best() -> None:
    draw = random.Random(0)
    for _ in range(50):
        points = [(x / 8, draw.random()) for x in range(9)]
        corners = work_pictures.hull(points)
        for price in (draw.uniform(-9, 9) for _ in range(50)):
            assert min(points, key=lambda p: p[1] + price * p[0]) in corners
        for left, at, right in zip(corners, corners[1:], corners[2:], strict=False):
            before, after = ((b[1] - a[1]) / (b[0] - a[0]) for a, b in ((left, at), (at, right)))
            assert before < after


def test_the_curves_are_those_of_the_library() -> None:
    drawn = work_pictures.curve_budgets()
    steps, layers = work_pictures.RUN_STEPS, work_pictures.RUN_LAYERS
    for budgets in drawn.values():
        assert sum(budgets) / steps == pytest.approx(work_pictures.TOTAL)
    esa = load_preset("esa").method
    assert isinstance(esa, Schedule)
    flat = Schedule(
        esa.inner, esa.dense_steps, dense_layers=esa.dense_layers, curve=Curve(0.4, "flat")
    )

    def budget(site: Site) -> float:
        return flat.at(site).mean_budget or 0 if flat.active(site, 9600) else 1.0

    means = [
        sum(budget(Site(step, steps, layer, layers)) for layer in range(layers)) / layers
        for step in range(steps)
    ]
    assert list(drawn.values())[2] == pytest.approx(means)
    assert len(work_pictures.curves_figure().axes[0].lines) == 3


def test_what_is_said_of_looking_is_what_methods_do() -> None:
    """The shares are the methods' own; the words beside them follow from these."""
    table = tables.planning_table()
    said = {
        line.split("|")[1].strip(): line.split("|")[3].strip() for line in table.splitlines()[2:9]
    }
    assert said["`entropy`"] == f"{0.5 * 4 / 256:.3f}"
    assert said["`psa`"] == f"{0.5 / 4 / 4:.3f}"
    assert said["`ada_bsa`"] == f"{0.5 / 8:.3f}"
    assert said["`rd`"] == f"{4 / 128 * (1 + 1 / 128):.3f}"
    assert float(said["`rd`, statistics"]) < float(said["`rd`, mixed"]) < float(said["`rd`"])
    assert RateDistortion().keep == 1 / 4  # four times a run
    assert table in PAGE


def test_the_page_says_what_was_measured(told: dict[str, Any]) -> None:
    tokens, block = told["tokens"], told["block"]
    assert f"{tokens:,} tokens, blocks of {block}" in " ".join(PAGE.split())
    assert f"{tokens // block} blocks of {block} tokens" in PAGE
    assert f"for 0.3 in this one it is {told['one_head']['price']:.3f}." in " ".join(PAGE.split())
    total = Curve(0.46, "flat").budgets(30, 30, lambda step, layer: step < 6 or layer == 0)
    assert total[-1][-1] == pytest.approx(0.3, abs=0.01)
    totals = json.loads((ROOT / "benchmarks/results/quality-totals.json").read_text("utf-8"))
    rows = totals["rows"]
    assert told["weights"] == totals["weights"], "python -m docs.work_pictures measure, then draw"

    def at(method: str, steps: int, schedule: str = "exponential", total: float = 0.4) -> Any:
        wanted = method, schedule, steps, total
        return next(
            r for r in rows if (r["method"], r["schedule"], r["steps"], r["total"]) == wanted
        )

    for steps in (12, 30):
        assert at("entropy:tail=True", steps)["psnr"] < at("entropy", steps)["psnr"]
        assert at("psa", steps)["psnr"] < at("entropy", steps)["psnr"] - 3
        assert at("rd", steps, "linear")["psnr"] < at("rd", steps)["psnr"] - 1
    assert at("rd", 12)["planning"] == pytest.approx(2 * at("entropy", 12)["planning"], rel=0.1)
    planned = 1.2 * at("entropy", 30)["planning"]
    assert at("rd", 30)["planning"] == pytest.approx(planned, rel=0.05)


def test_in_the_pictured_call_psa_is_ahead_of_entropy(told: dict[str, Any]) -> None:
    error = {(row["method"], row["budget"]): row["error"] for row in told["rows"]}
    for budget in work_pictures.BUDGETS:
        assert error["psa", budget] < error["entropy", budget]  # and it costs no more
        assert error["rd", budget] <= error["entropy", budget]


def test_pictures_are_small_and_on_the_page() -> None:
    found = sorted((ROOT / "docs/assets").glob("work-*.svg"))
    assert len(found) == 4
    for picture in found:
        assert picture.stat().st_size < 150_000
        assert f"assets/{picture.name}" in PAGE
