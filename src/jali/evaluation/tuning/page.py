"""The page of a tuning: the recipe in words, the totals that were tried, what probes of steps and
layers gained, the budgets of the recipe, and the clips."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jali.evaluation.arena.leaderboard import speed_ups, spread
from jali.evaluation.arena.page import films_of, page_data
from jali.evaluation.arena.record import RUNS, Results
from jali.evaluation.arena.row import Row
from jali.evaluation.quality.interval import POSITIVE, Interval, interval
from jali.evaluation.quality.measure import describe
from jali.evaluation.report.template import render
from jali.evaluation.tuning.picture import draw_budgets, draw_gains, draw_points
from jali.evaluation.tuning.place import Gain, Place
from jali.files import write_text
from jali.integration.recipe import DIGITS, Recipe

PAGE, POINTS, GAINS, BUDGETS = "tuning.html", "totals.svg", "gains.svg", "budgets.svg"
HEADINGS = {"speedup": "clip ×"}


@dataclass(frozen=True)
class Tried:
    """A row of the table: a point on the prompts that decide."""

    row: Row
    clips: int
    achieved: float
    metrics: dict[str, Interval]
    chosen: bool


def write_page(
    folder: Path,
    recipe: Recipe,
    results: Results,
    deciding: Sequence[int],
    gains: Mapping[Place, Gain],
    layers: int,
) -> None:
    tried = tried_points(folder, recipe, results, deciding)
    pictures = []
    if importlib.util.find_spec("matplotlib") is not None and tried:
        pictures = _draw(folder, recipe, tried, gains, layers)
    write_text(folder / PAGE, render_page(folder, recipe, results, tried, pictures))


def tried_points(
    folder: Path, recipe: Recipe, results: Results, deciding: Sequence[int]
) -> list[Tried]:
    """Everything that has clips of all prompts that decide, method by method. Those of probes were
    not kept."""
    found = []
    for row in results.rows():
        known = results.of(row)
        kept = (folder / RUNS / row.folder).is_dir()
        if not set(deciding) <= set(known) or row.schedule is None or not kept:
            continue
        records = [known[first] for first in deciding]
        metrics = {
            name: interval([v for r in records for v in r.metrics[name]], describe(name).bounds)
            for name in records[0].metrics
        }
        ratios = [sum(several) / len(several) for several in speed_ups(results, records)]
        metrics["speedup"] = interval(ratios, POSITIVE)
        curve = row.schedule.curve(float(row.total or 0))
        chosen = recipe.curve == curve and row.method.make() == recipe.method
        clips = sum(len(results.group(first)) for first in deciding)
        achieved = sum(record.achieved for record in records) / len(records)
        found.append(Tried(row, clips, achieved, metrics, chosen))
    return sorted(found, key=lambda one: (one.row.label, one.row.spread, one.row.total or 0))


def _draw(
    folder: Path,
    recipe: Recipe,
    tried: Sequence[Tried],
    gains: Mapping[Place, Gain],
    layers: int,
) -> list[tuple[str, Path]]:
    metric = recipe.target.metric
    lines: dict[str, list[tuple[float, Interval]]] = {}
    chosen = None
    for one in tried:
        total, value = float(one.row.total or 0), one.metrics[metric]
        lines.setdefault(_name(one.row), []).append((total, value))
        if one.chosen and value.mean is not None:
            chosen = total, value.mean
    draw_points(lines, chosen, recipe.target.value, _heading(metric), folder / POINTS)
    words = f"{_heading(metric)} over the total that was asked for, on the prompts that decide"
    made = [(words, folder / POINTS)]
    if gains:
        draw_gains(gains, folder / GAINS)
        words = "What clips gain by more work in some steps or layers, at the same total"
        made.append((words, folder / GAINS))
    if recipe.curve is not None:
        draw_budgets(recipe.curve, recipe.run.steps, layers, folder / BUDGETS)
        made.append(("The recipe: the budget of every step and layer", folder / BUDGETS))
    return made


def render_page(
    folder: Path,
    recipe: Recipe,
    results: Results,
    tried: Sequence[Tried],
    pictures: Sequence[tuple[str, Path]] = (),
) -> str:
    """One self-contained HTML page."""
    rows = [one.row for one in tried]
    films, shown = films_of(results, rows, folder)
    boards: dict[str, list[Row]] = {}
    for row in rows:
        boards.setdefault(_name(row), []).append(row)
    names = list(dict.fromkeys(name for one in tried for name in one.metrics))
    return render(
        "jali.evaluation.tuning",
        "page.html",
        recipe=recipe,
        results=results,
        tried=tried,
        metrics=[(name, _heading(name)) for name in names],
        device=str(recipe.machine.get("device") or "an unknown machine"),
        pictures=[
            (words, base64.b64encode(path.read_bytes()).decode()) for words, path in pictures
        ],
        films=films,
        data=page_data(results, boards, shown, films, lambda row: f"total {row.total:g}"),
        spread=spread,
        spread_words=spread_words,
        digits=DIGITS,
    )


def _name(row: Row) -> str:
    return f"{row.label}, {spread_words(row)}"


def spread_words(row: Row) -> str:
    """The schedule as written, where that is a word."""
    assert row.schedule is not None
    is_word = isinstance(row.schedule.shape, str) and not row.schedule.layers
    return row.spread if is_word else "moved work"


def _heading(metric: str) -> str:
    return HEADINGS.get(metric) or describe(metric).heading.replace(" (Alex)", "")
