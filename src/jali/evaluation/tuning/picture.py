"""Pictures of a tuning: what every total that was tried gives, what probes of steps and layers
gained, and the budgets of the recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jali.evaluation.arena.pareto import COLOURS, save
from jali.evaluation.quality.interval import Interval
from jali.evaluation.tuning.place import Gain, Place
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


def draw_gains(gains: Mapping[Place, Gain], path: Path) -> None:
    """What more work in a place gained, with standard errors: steps on the left, layers beside."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(place.kind for place in gains))
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    several: Any = figure.subplots(1, len(kinds), sharey=True, squeeze=False)
    for axes, kind, colour in zip(several[0], kinds, COLOURS, strict=False):
        own = {place: gain for place, gain in gains.items() if place.kind == kind}
        axes.bar(
            [(place.first + place.end - 1) / 2 for place in own],
            [gain.mean for gain in own.values()],
            width=[0.85 * (place.end - place.first) for place in own],
            yerr=[gain.error if math.isfinite(gain.error) else 0 for gain in own.values()],
            color=colour, ecolor="#868e96", capsize=2,
        )  # fmt: skip
        axes.axhline(0, color="#868e96", linewidth=1)
        axes.set_xlabel(kind[:-1])
        _whole_numbers(axes.xaxis)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    several[0][0].set_ylabel("gain, dB")
    save(figure, path)


def draw_budgets(curve: Curve, steps: int, layers: int, path: Path) -> None:
    """The budget of every step and layer."""
    table = curve.budgets(steps, layers)
    axes = _axes(3.0)
    grid = [[row[layer] for row in table] for layer in range(layers)]
    shown = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=1, origin="lower")
    axes.figure.colorbar(shown, ax=axes, label="budget")
    axes.set_ylabel("layer")
    axes.set_xlabel("step")
    _whole_numbers(axes.xaxis, axes.yaxis)
    save(axes.figure, path)


def _whole_numbers(*several: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in several:
        axis.set_major_locator(MaxNLocator(integer=True))


def _axes(height: float = 4.4) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes: Any = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes
