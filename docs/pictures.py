"""The pictures of README and docs.

python docs/pictures.py                  # plans, orders and a schedule, drawn from made-up heads
python docs/pictures.py --report FOLDER  # the page of `jali compare FOLDER`, as a browser shows it
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jali import (
    Budget,
    Entropy,
    Gilbert,
    Psa,
    Raster,
    RfV2,
    Schedule,
    Site,
    Tiled,
    TokenGrid,
    attend,
)
from jali.evaluation.demo import MadeUpHeads, make_heads
from jali.evaluation.inspection.plan_picture import heads_figure, maps_figure
from jali.methods import METHODS, Dense, Method
from jali.planning.plan import BlockPlan
from jali.tokens.order import Order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSETS = Path(__file__).parent / "assets"
FOUR = (0, 1, 3, 4)  # local, temporal, semantic, diffuse
BUDGET = 0.25
INK, FAINT = "#1d2433", "#8a93a6"
CHROMIUM = "/usr/bin/chromium"


def plan_of(heads: MadeUpHeads, method: Method) -> BlockPlan:
    plan = attend(heads.q, heads.k, heads.v, method=method, grid=heads.grid).plan
    assert plan is not None
    return plan


def orders_figure(shape: tuple[int, int, int], block: int, frames: int) -> Figure:
    """The first frames of a video, every block in a colour of its own: a row for each order."""
    orders: tuple[tuple[str, Order], ...] = (
        ("Raster", Raster()),
        ("Tiled", Tiled((2, 8, 8))),
        ("Gilbert", Gilbert()),
    )
    grid = TokenGrid.video(*shape)
    figure, axes = _axes(len(orders), frames, 2.1 * frames, 1.45 * len(orders) + 0.2)
    shuffled = np.random.default_rng(2).permutation(-(-grid.tokens // block))
    for row, (name, order) in enumerate(orders):
        index = order.positions(grid)
        tokens = np.arange(grid.tokens) if index is None else index
        blocks = np.empty(grid.tokens, dtype=int)
        blocks[tokens] = np.arange(grid.tokens) // block
        video = blocks.reshape(shape)
        for frame in range(frames):
            own = axes[row, frame]
            own.imshow(shuffled[video[frame]], cmap="Set3", aspect="auto", interpolation="nearest")
            # One block, outlined wherever it lies.
            mine = video[frame] == blocks[grid.tokens // shape[0] // 2 + shape[2] // 2]
            if mine.any():
                own.contour(mine, levels=[0.5], colors=INK, linewidths=1.4)
            if row == 0:
                own.set_title(f"frame {frame}", fontsize=8, color=FAINT)
        axes[row, 0].set_ylabel(name, fontsize=9, color=INK)
    return figure


def schedule_figure(method: Schedule, steps: int, layers: int) -> Figure:
    """Which calls of a run are sparse: layers up, steps across."""
    figure, axes = _axes(1, 1, 5.2, 2.6)
    sparse = [
        [
            method.active(Site(step=s, steps=steps, layer=n, layers=layers), 32760)
            for s in range(steps)
        ]
        for n in range(layers)
    ]
    own = axes[0, 0]
    own.imshow(sparse, cmap="GnBu", vmin=-0.4, vmax=1.3, aspect="auto", origin="lower")
    own.set(xlabel="step", ylabel="layer")
    own.set_xticks(range(0, steps, 5))
    own.set_yticks([0, 10, 20, layers - 1])
    own.set_xticks(np.arange(steps + 1) - 0.5, minor=True)
    own.set_yticks(np.arange(layers + 1) - 0.5, minor=True)
    own.grid(which="minor", color="white", linewidth=0.5)
    own.tick_params(which="both", length=0, labelsize=8, labelcolor=FAINT)
    return figure


def _axes(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for own in axes.flat:
        own.set_xticks([])
        own.set_yticks([])
        for spine in own.spines.values():
            spine.set_edgecolor("#c9cfda")
            spine.set_linewidth(0.6)
    return figure, axes


def save(figure: Figure, name: str) -> None:
    figure.savefig(ASSETS / name, dpi=96, metadata={"Software": None})


def draw() -> None:
    torch.set_num_threads(2)
    heads = make_heads((10, 24, 40))
    tiled = Entropy(Budget(BUDGET), q_block=128, k_block=128, order=Tiled((2, 8, 8)))
    save(heads_figure(plan_of(heads, tiled), FOUR, heads.kinds, query=37), "heads.png")
    pyramid = plan_of(heads, Psa().with_budget(BUDGET))
    save(heads_figure(pyramid, FOUR, heads.kinds, query=pyramid.layout.M // 2), "pyramid.png")
    windows = plan_of(heads, RfV2(sparsity=1 - BUDGET, first_frame=False))
    save(heads_figure(windows, FOUR, heads.kinds, query=37), "windows.png")
    kinds = {name: kind for name, kind in METHODS.items() if kind is not Dense}
    plans = {name: plan_of(heads, kind().with_budget(BUDGET)) for name, kind in kinds.items()}
    save(maps_figure(plans, heads.kinds), "methods.png")
    save(orders_figure((4, 24, 40), block=128, frames=4), "orders.png")
    dense = {"dense_steps": 0.2, "dense_last_steps": 1, "dense_layers": (0, -1)}
    save(schedule_figure(Schedule(Entropy(Budget(0.3)), **dense), 25, 30), "schedule.png")


def photograph(folder: Path) -> None:
    """The top of a report page, in a window of 1200 pixels."""
    from playwright.sync_api import sync_playwright

    from jali.evaluation.report import compare_page, write_page

    with tempfile.TemporaryDirectory() as place, sync_playwright() as play:
        page_file = Path(place) / "page.html"
        write_page(page_file, compare_page([folder]))
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(page_file.as_uri())
        page.wait_for_timeout(1500)  # films load, the first frames are drawn
        page.screenshot(path=ASSETS / "report.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="a folder of runs")
    folder = parser.parse_args().report
    if folder is None:
        draw()
    else:
        photograph(folder)


if __name__ == "__main__":
    main()
