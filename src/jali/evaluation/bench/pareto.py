"""Quality over speed-up, a line for every method, and the front that none of them beats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jali.evaluation.bench.pipeline import DENSE, Row

INK, FAINT = "#1d2433", "#8a93a6"
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#1971c2", "#868e96", "#f08c00")
CONTROLS = ("random", "local")
WORDS = {"psnr": "PSNR against dense, dB", "ssim": "SSIM against dense"}


def draw(rows: Sequence[Row], path: Path, title: str, metric: str = "psnr") -> None:
    """One figure; the file's ending decides its format."""
    from matplotlib.figure import Figure

    found = [row for row in rows if row.label != DENSE and metric in row.quality]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes: Any = figure.add_subplot()
    for number, method in enumerate(dict.fromkeys(row.method for row in found)):
        own = sorted((r for r in found if r.method == method), key=lambda r: r.speedup)
        control = method in CONTROLS
        axes.plot(
            [row.speedup for row in own],
            [row.quality[metric] for row in own],
            ":" if control else "-",
            marker="o",
            markersize=5,
            color=FAINT if control else COLOURS[number % len(COLOURS)],
            label=method,
        )
        for row in own:
            name = row.label if row.budget is None else f"{row.budget:g}"
            axes.annotate(
                name, (row.speedup, row.quality[metric]), fontsize=7, color=FAINT,
                xytext=(4, 4), textcoords="offset points",
            )  # fmt: skip
    front = sorted((r for r in found if r.best), key=lambda r: r.speedup)
    if len(front) > 1 and metric == "psnr":
        axes.plot(
            [r.speedup for r in front],
            [r.quality[metric] for r in front],
            color="#ffd43b",
            linewidth=7,
            alpha=0.45,
            zorder=0,
            label="best",
            solid_capstyle="round",
        )
    axes.axvline(1, color="#dee2e6", linewidth=1, zorder=0)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel("speed-up of a whole clip over dense in the same run; labels are budgets")
    axes.set_ylabel(WORDS.get(metric, metric))
    if found:
        axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
