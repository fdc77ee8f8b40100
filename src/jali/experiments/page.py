"""The collected table as one page: quality over speed-up, and every row. No scripts, no network."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jali.experiments.collect import ResultTable

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#666666")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 380, 62, 48, 18, 16
# What is plotted upwards, the first that was measured.
QUALITY = (("psnr", "PSNR against dense, dB"), ("ssim", "SSIM against dense"))
SHOWN = {
    "tag": "experiment", "variant": "variant", "budget": "asked", "cost": "cost",
    "dense_seconds": "dense s", "seconds": "s", "speedup": "speed-up",
}  # fmt: skip
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #6b6b76; --line: #d9d9e0; --back: #fff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececf1; --soft: #a0a0ab; --line: #3a3a44; --back: #17171b }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left }
th { color: var(--soft); font-weight: 500 } tr.front td { font-weight: 600 }
svg { width: 100%; max-width: 640px; height: auto } svg text { fill: var(--soft); font-size: 12px }
.note { color: var(--soft) }
"""


def render(results: ResultTable) -> str:
    front = pareto(results.rows)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>jali experiments</title><style>{STYLE}</style></head><body>",
        f"<h1>{len(results.rows)} sparse runs against dense</h1>",
        *_plots(results.rows, front),
        "<h2>Every row</h2>",
        '<p class="note">asked: budget, the share of dense attention\'s work that was asked for; '
        "cost: the share that was done. Bold rows are on the front: nothing else is both faster "
        "and closer to dense.</p>",
        *_table(results.rows, front),
        *_left_out(results.left_out),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def pareto(rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """The rows that no row of the same model, size and steps beats in both speed and quality."""
    front = set()
    for i, row in enumerate(rows):
        x, y = _point(row)
        if x is None or y is None:
            continue
        beaten = False
        for other in rows:
            u, v = _point(other)
            if _setting(other) != _setting(row) or u is None or v is None:
                continue
            beaten = beaten or (u >= x and v >= y and (u > x or v > y))
        if not beaten:
            front.add(i)
    return front


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("model", "height", "width", "num_frames", "steps"))


def _metric(row: Mapping[str, Any]) -> tuple[str, str]:
    return next((m for m in QUALITY if row.get(f"quality.{m[0]}.mean") is not None), QUALITY[0])


def _point(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    return row.get("speedup"), row.get(f"quality.{_metric(row)[0]}.mean")


def _plots(rows: Sequence[Mapping[str, Any]], front: set[int]) -> list[str]:
    parts = []
    for setting in dict.fromkeys(_setting(row) for row in rows):
        model, height, width, frames, steps = setting
        here = [i for i, row in enumerate(rows) if _setting(row) == setting]
        title = f"{model}, {height}×{width}, {frames} frames, {steps} steps"
        parts += [f"<h2>{html.escape(title)}</h2>", _plot([rows[i] for i in here], title)]
        names = ", ".join(
            f"{rows[i]['variant']} at {_number(rows[i].get('budget'))}" for i in here if i in front
        )
        parts.append(f'<p class="note">On the front: {html.escape(names or "nothing")}.</p>')
    return parts


def _plot(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    points = [(row, *_point(row)) for row in rows]
    drawn = [(row, x, y) for row, x, y in points if x is not None and y is not None]
    if not drawn:
        return '<p class="note">Nothing to plot: no row has both a speed and a quality.</p>'
    xs, ys = _ticks([1.0, *(x for _, x, _ in drawn)]), _ticks([y for _, _, y in drawn])

    def across(x: float) -> str:
        return f"{LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT):.1f}"

    def up(y: float) -> str:
        return f"{HEIGHT - BOTTOM - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - BOTTOM - TOP):.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="quality over speed-up, {html.escape(title)}">'
    ]
    for x in xs:
        parts.append(
            f'<line x1="{across(x)}" x2="{across(x)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
            f'stroke="var(--line)"/><text x="{across(x)}" y="{HEIGHT - BOTTOM + 17}" '
            f'text-anchor="middle">{_number(x)}×</text>'
        )
    for y in ys:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y)}" y2="{up(y)}" '
            f'stroke="var(--line)"/><text x="{LEFT - 6}" y="{up(y)}" dy="4" '
            f'text-anchor="end">{_number(y)}</text>'
        )
    for number, variant in enumerate(dict.fromkeys(row["variant"] for row, _, _ in drawn)):
        colour = COLOURS[number % len(COLOURS)]
        own = sorted(((x, y, row) for row, x, y in drawn if row["variant"] == variant),
                     key=lambda p: p[:2])  # fmt: skip
        line = " ".join(f"{across(x)},{up(y)}" for x, y, _ in own)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" opacity=".5"/>')
        for x, y, row in own:
            told = f"{variant}, asked {_number(row.get('budget'))}: {x:.2f}×, {_number(y)}"
            parts.append(
                f'<circle cx="{across(x)}" cy="{up(y)}" r="5" fill="{colour}">'
                f"<title>{html.escape(told)}</title></circle>"
            )
        parts.append(
            f'<circle cx="{LEFT + 12}" cy="{TOP + 14 + 18 * number}" r="5" fill="{colour}"/>'
            f'<text x="{LEFT + 22}" y="{TOP + 18 + 18 * number}">{html.escape(str(variant))}</text>'
        )
    parts.append(
        f'<text x="{(WIDTH + LEFT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"speed-up over dense</text>"
        f'<text transform="translate(14 {(HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{_metric(drawn[0][0])[1]}</text></svg>'
    )
    return "".join(parts)


def _ticks(values: Sequence[float]) -> list[float]:
    """About five round numbers around the values."""
    low, high = min(values), max(values)
    room = (high - low) or abs(high) or 1.0
    raw = room / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(k * step, 10) for k in range(first, max(last, first + 1) + 1)]


def _table(rows: Sequence[Mapping[str, Any]], front: set[int]) -> list[str]:
    metrics = sorted(
        {name for row in rows for name in row if name.endswith(".mean")},
    )
    heads = [*SHOWN.values(), *(name.split(".")[1] for name in metrics)]
    parts = ['<div class="scroll"><table><thead><tr>']
    parts += [f"<th>{html.escape(head)}</th>" for head in heads]
    parts.append("</tr></thead><tbody>")
    for i, row in enumerate(rows):
        cells = [_number(row.get(name)) for name in (*SHOWN, *metrics)]
        mark = ' class="front"' if i in front else ""
        parts.append(f"<tr{mark}>{''.join(f'<td>{html.escape(c)}</td>' for c in cells)}</tr>")
    parts.append("</tbody></table></div>")
    return parts


def _left_out(left_out: Mapping[str, str]) -> list[str]:
    if not left_out:
        return []
    items = [f"<li>{html.escape(t)}: {html.escape(why)}</li>" for t, why in left_out.items()]
    return ["<h2>Left out</h2>", "<ul>", *items, "</ul>"]


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
