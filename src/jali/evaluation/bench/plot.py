"""Pictures of benchmarks: kernels' speed-up over cost, and pipelines' quality over speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.evaluation.bench.pipeline import DENSE, PipelineRow
from jali.evaluation.inspection.judge import CONTROLS
from jali.evaluation.inspection.plan_picture import FAINT, INK
from jali.files import make_folder, whole_file

if TYPE_CHECKING:
    from jali.evaluation.bench.kernel import KernelRow

BACKENDS = {"fa4": "#0b7285", "triton": "#e8590c", "flex": "#868e96", "torch": "#adb5bd"}
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#1971c2", "#868e96", "#f08c00")
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
    _save(figure, path)


def plot_pareto(rows: Sequence[PipelineRow], path: Path, title: str, metric: str = "psnr") -> None:
    """A line for every method, and the front that none of them beats. The file's ending decides
    its format."""
    from matplotlib.figure import Figure

    found = [row for row in rows if row.label != DENSE and metric in row.quality]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes: Any = figure.add_subplot()
    for number, method in enumerate(dict.fromkeys(row.method for row in found)):
        own = sorted((r for r in found if r.method == method), key=lambda r: r.speedup)
        control = method in CONTROLS
        colour = FAINT if control else COLOURS[number % len(COLOURS)]
        axes.plot(
            [row.speedup for row in own], [row.quality[metric] for row in own],
            "o:" if control else "o-", markersize=5, color=colour, label=method,
        )  # fmt: skip
    front = sorted((r for r in found if r.best), key=lambda r: r.speedup)
    if len(front) > 1 and metric == "psnr":
        axes.plot(
            [r.speedup for r in front], [r.quality[metric] for r in front], color="#ffd43b",
            linewidth=7, alpha=0.45, zorder=0, label="best", solid_capstyle="round",
        )  # fmt: skip
    axes.axvline(1, color="#dee2e6", linewidth=1, zorder=0)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel("speed-up of a whole clip over dense in the same run; labels are budgets")
    axes.set_ylabel(WORDS.get(metric, metric))
    if found:
        axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    names = [row.label if row.budget is None else f"{row.budget:g}" for row in found]
    _label(axes, names, [(row.speedup, row.quality[metric]) for row in found])
    _save(figure, path)


# Around a point, in points: upwards right, down, left; the first that is free.
_PLACES = (((5, 3), "left"), ((5, -9), "left"), ((-5, 3), "right"), ((-5, -9), "right"))


def _label(axes: Any, names: Sequence[str], points: Sequence[tuple[float, float]]) -> None:
    """Words beside points; a word that would lie over another one is left out."""
    axes.figure.draw_without_rendering()  # only then is it known where things are
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent()]
    for name, point in zip(names, points, strict=True):
        for offset, side in _PLACES:
            word = axes.annotate(
                name, point, offset, textcoords="offset points", fontsize=7, color=FAINT, ha=side,
            )  # fmt: skip
            box = word.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            word.remove()


def _save(figure: Any, path: Path) -> None:
    make_folder(path.parent)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:] or "png", dpi=150)
