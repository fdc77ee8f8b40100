"""Two pictures of a tuning: what every total that was tried gives, and the curve of the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jali.evaluation.arena.pareto import COLOURS, save
from jali.evaluation.quality.interval import Interval
from jali.planning.curve import Curve


def draw_points(
    lines: Mapping[str, Sequence[tuple[float, Interval]]],
    chosen: tuple[float, float] | None,
    target: float,
    heading: str,
    path: Path,
) -> None:
    """The metric over the total, a line for every method, with intervals over clips."""
    axes = _axes()
    for (name, points), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
        known = [(x, y, y.mean) for x, y in sorted(points, key=lambda p: p[0])]
        known_means = [mean for *_, mean in known if mean is not None]
        axes.plot([x for x, *_ in known], known_means, "o-", color=colour, markersize=5, label=name)
        for x, y, _ in known:
            if y.low is not None and y.high is not None:
                axes.plot([x, x], [y.low, y.high], color=colour, linewidth=1, alpha=0.6)
    axes.axhline(target, color="#868e96", linewidth=1, linestyle="--", label="target", zorder=0)
    if chosen is not None:
        axes.plot(*chosen, "o", markersize=13, markerfacecolor="none", color="#f08c00")
    axes.set_xlabel("total: share of all attention work of a run, as asked")
    axes.set_ylabel(heading)
    axes.legend(frameon=False, fontsize=8)
    save(axes.figure, path)


def draw_curve(curve: Curve, steps: int, layers: int, path: Path) -> None:
    """The budget of every step, as bars; of every step and layer where layers have their own."""
    table = curve.budgets(steps, layers)
    axes = _axes(3.0)
    if curve.layers:
        grid = [[row[layer] for row in table] for layer in range(layers)]
        shown = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
        axes.figure.colorbar(shown, ax=axes, label="budget")
        axes.set_ylabel("layer")
    else:
        axes.bar(range(steps), [row[0] for row in table], color=COLOURS[0], width=0.85)
        axes.set_ylabel("budget")
        axes.set_ylim(0, 1.05)
    axes.set_xlabel("step")
    save(axes.figure, path)


def _axes(height: float = 4.4) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes: Any = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes
