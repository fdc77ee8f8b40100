"""Speed-up over cost, one panel per shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jali.evaluation.bench.kernel import Row

COLOURS = {"fa4": "#0b7285", "triton": "#e8590c", "flex": "#868e96", "torch": "#adb5bd"}


def speedups(rows: Sequence[Row], path: Path, whole: bool = False) -> None:
    """Draw the slower of the two kinds of input for every backend and density."""
    from matplotlib.figure import Figure

    # Whole calls of other methods have costs of their own; lists of the entropy method share them.
    found = [row for row in rows if row.why_not is None and row.method == "entropy"]
    shapes = list(dict.fromkeys(row.shape for row in found))
    figure = Figure(figsize=(3.6 * max(1, len(shapes)), 3.4), layout="constrained")
    for number, shape in enumerate(shapes):
        axes: Any = figure.add_subplot(1, len(shapes), number + 1)
        budgets = sorted({row.budget for row in found})
        axes.plot(budgets, [1 / b for b in budgets], ":", color="#ced4da", label="ideal")
        for backend in dict.fromkeys(row.backend for row in found):
            points: dict[float, float] = {}
            for row in found:
                if row.shape == shape and row.backend == backend:
                    value = row.whole_speedup if whole and row.whole_speedup else row.speedup
                    points[row.budget] = min(value, points.get(row.budget, value))
            at = sorted(points)
            colour = COLOURS.get(backend)
            axes.plot(at, [points[b] for b in at], "o-", label=backend, color=colour, markersize=4)
        axes.axhline(1, color="#dee2e6", linewidth=1, zorder=0)
        axes.set(title=shape, xlabel="budget", xlim=(1.03, 0), ylim=(0, None))
        if number == 0:
            axes.set_ylabel("speed-up over the fastest dense kernel")
            axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
