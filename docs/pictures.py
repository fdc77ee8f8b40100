"""The pictures of README and docs, drawn from the demo: python docs/pictures.py"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from jali import Budget, Entropy, Psa, RfV2, Tiled, attend
from jali.demo import Scene, make_scene
from jali.demo.picture import heads_figure, maps_figure
from jali.methods import METHODS, Dense, Method
from jali.plan import BlockPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ASSETS = Path(__file__).parent / "assets"
FOUR = (0, 1, 3, 4)  # local, temporal, semantic, diffuse
BUDGET = 0.25


def plan_of(scene: Scene, method: Method) -> BlockPlan:
    plan = attend(scene.q, scene.k, scene.v, method=method, grid=scene.grid).plan
    assert plan is not None
    return plan


def save(figure: Figure, name: str) -> None:
    figure.savefig(ASSETS / name, dpi=96, metadata={"Software": None})


def main() -> None:
    torch.set_num_threads(2)
    scene = make_scene((10, 24, 40))
    tiled = Entropy(Budget(BUDGET), q_block=128, k_block=128, order=Tiled((2, 8, 8)))
    save(heads_figure(plan_of(scene, tiled), FOUR, scene.kinds, query=37), "heads.png")
    pyramid = plan_of(scene, Psa().with_budget(BUDGET))
    save(heads_figure(pyramid, FOUR, scene.kinds, query=pyramid.layout.M // 2), "pyramid.png")
    windows = plan_of(scene, RfV2(sparsity=1 - BUDGET, first_frame=False))
    save(heads_figure(windows, FOUR, scene.kinds, query=37), "windows.png")
    kinds = {name: kind for name, kind in METHODS.items() if kind is not Dense}
    plans = {name: plan_of(scene, kind().with_budget(BUDGET)) for name, kind in kinds.items()}
    save(maps_figure(plans, scene.kinds), "methods.png")


if __name__ == "__main__":
    main()
