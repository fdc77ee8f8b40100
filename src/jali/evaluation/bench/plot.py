"""Pictures of benchmarks: kernels' speed-up over cost, and pipelines' quality over speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.evaluation.arena.pareto import Line, draw_pareto, save
from jali.evaluation.bench.pipeline import DENSE, PipelineRow
from jali.name import CONTROLS

if TYPE_CHECKING:
    from jali.evaluation.bench.kernel import KernelRow

BACKENDS = {"fa4": "#0b7285", "triton": "#e8590c", "flex": "#868e96", "torch": "#adb5bd"}
WORDS = {"psnr": "PSNR against dense, dB", "ssim": "SSIM against dense"}


def plot_speedups(rows: Sequence[KernelRow], path: Path, whole: bool = False) -> None:
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
            colour = BACKENDS.get(backend)
            axes.plot(at, [points[b] for b in at], "o-", label=backend, color=colour, markersize=4)
        axes.axhline(1, color="#dee2e6", linewidth=1, zorder=0)
        axes.set(title=shape, xlabel="budget", xlim=(1.03, 0), ylim=(0, None))
        if number == 0:
            axes.set_ylabel("speed-up over the fastest dense kernel")
            axes.legend(frameon=False)
    save(figure, path)


def plot_pareto(rows: Sequence[PipelineRow], path: Path, title: str, metric: str = "psnr") -> None:
    """A line for every method, and the front that none of them beats. The file's ending decides
    its format."""
    found = [row for row in rows if row.label != DENSE and metric in row.quality]
    lines = []
    for method in dict.fromkeys(row.method for row in found):
        own = sorted((r for r in found if r.method == method), key=lambda r: r.speedup)
        lines.append(
            Line(
                method,
                [(row.speedup, row.quality[metric]) for row in own],
                [row.label if row.budget is None else f"{row.budget:g}" for row in own],
                control=method in CONTROLS,
            )
        )
    best = [(r.speedup, r.quality[metric]) for r in found if r.best and metric == "psnr"]
    across = "speed-up of a whole clip over dense in the same run; labels are budgets"
    draw_pareto(lines, best, path, title, (across, WORDS.get(metric, metric)), mark=1)
