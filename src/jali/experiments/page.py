"""The collected table as one page: quality over speed-up, and every row. No scripts, no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jali.experiments.collect import ResultTable

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#666666")
# What is plotted upwards, the first that was measured.
QUALITY = {"psnr": "PSNR against dense, dB", "ssim": "SSIM against dense"}
SETTING = ("model", "height", "width", "num_frames", "steps")
Row = Mapping[str, Any]


def render(table: ResultTable) -> str:
    """The page of `page.html`."""
    from jinja2 import Environment

    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(
        Path(__file__).with_name("page.html").read_text("utf-8")
    )
    front = pareto(table.rows)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, row in enumerate(table.rows):
        groups.setdefault(_setting(row), []).append(i)
    return template.render(
        plots=[_plot(table.rows, numbers, front) for numbers in groups.values()],
        rows=[[number(row.get(name)) for name in table.headings] for row in table.rows],
        heads=list(table.headings.values()),
        front=front, colours=COLOURS, left_out=table.left_out,
    )  # fmt: skip


def pareto(rows: Sequence[Row]) -> set[int]:
    """The rows that no row of the same model, size and steps beats in both speed and quality."""

    def beats(other: Row, row: Row) -> bool:
        (x, y), (u, v) = _point(row), _point(other)
        same = _setting(other) == _setting(row)
        return same and None not in (u, v) and u >= x and v >= y and (u > x or v > y)

    return {
        i for i, row in enumerate(rows)
        if None not in _point(row) and not any(beats(other, row) for other in rows)
    }  # fmt: skip


def number(value: Any) -> str:
    """A cell, for people."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _setting(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in SETTING)


def _metric(row: Row) -> str:
    return next((m for m in QUALITY if row.get(f"quality.{m}.mean") is not None), "psnr")


def _point(row: Row) -> tuple[Any, Any]:
    return row.get("speedup"), row.get(f"quality.{_metric(row)}.mean")


def _plot(rows: Sequence[Row], numbers: Sequence[int], front: set[int]) -> dict[str, Any]:
    """Quality over speed-up for one model and size, in the template's coordinates."""
    here = [rows[i] for i in numbers]
    model, height, width, frames, steps = _setting(here[0])
    names = [
        f"{rows[i]['variant']} at {number(rows[i].get('budget'))}" for i in numbers if i in front
    ]
    found: dict[str, Any] = {
        "title": f"{model}, {height}×{width}, {frames} frames, {steps} steps",
        "front": ", ".join(names),
        "lines": {},
    }
    drawn = sorted((row for row in here if None not in _point(row)), key=_point)
    if not drawn:
        return found
    xs = _ticks([1.0, *(_point(row)[0] for row in drawn)])
    ys = _ticks([_point(row)[1] for row in drawn])

    def across(x: float) -> str:
        return f"{62 + (x - xs[0]) / (xs[-1] - xs[0]) * 548:.1f}"

    def up(y: float) -> str:
        return f"{352 - (y - ys[0]) / (ys[-1] - ys[0]) * 294:.1f}"

    for variant in dict.fromkeys(row["variant"] for row in here if row in drawn):
        found["lines"][variant] = [
            (
                across(x), up(y),
                f"{variant}, asked {number(row.get('budget'))}: {x:.2f}×, {number(y)}",
            )
            for row in drawn if row["variant"] == variant for x, y in [_point(row)]
        ]  # fmt: skip
    found["xs"] = [(across(x), number(x)) for x in xs]
    found["ys"] = [(up(y), number(y)) for y in ys]
    return found | {"axis": QUALITY[_metric(here[0])]}


def _ticks(values: Sequence[float]) -> list[float]:
    """About five round numbers around the values."""
    low, high = min(values), max(values)
    room = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(room / 4))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= room / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(k * step, 10) for k in range(first, max(last, first + 1) + 1)]
