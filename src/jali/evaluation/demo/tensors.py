"""The demonstration that needs no model: every method on one made-up layer, as files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jali.evaluation.demo.compare import Comparison
from jali.evaluation.demo.heads import MadeUpHeads

FULL, QUICK = (10, 24, 40), (6, 20, 40)
BUDGET = 0.25
PAGE = "index.html"


def facts_of(heads: MadeUpHeads, found: Comparison, budget: float, seed: int) -> dict[str, Any]:
    """Everything the table says, and what it was measured on."""
    import torch

    from jali import __version__

    return {
        "jali": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "grid": str(heads.grid),
        "tokens": heads.grid.tokens,
        "heads": list(heads.kinds),
        "head_dim": heads.q.shape[-1],
        "budget": budget,
        "seed": seed,
        "dense_seconds": found.dense_seconds,
        "rows": [dataclasses.asdict(row) for row in found.rows],
    }


def draw(folder: Path, heads: MadeUpHeads, found: Comparison) -> list[str]:
    """The pictures and the page; nothing where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    from jali.evaluation.demo import page
    from jali.evaluation.inspection import plan_picture as picture

    names = []
    for method, plan in found.plans.items():
        names.append(f"plan-{method}.png")
        plan.figure().savefig(folder / names[-1], dpi=110, bbox_inches="tight")
    maps = picture.maps_figure(found.plans, heads.kinds)
    (folder / "heads.png").write_bytes(page.png(maps))
    pyramid = found.plans["psa"]
    middle = pyramid.layout.M // 2
    seen = picture.heads_figure(pyramid, range(len(heads.kinds)), heads.kinds, middle)
    (folder / "footprint.png").write_bytes(page.png(seen))
    captions = {
        "What every head keeps, by method: darker is read more finely": maps,
        "What one query block reads under psa, on the frames (its own tokens outlined)": seen,
    }
    (folder / PAGE).write_text(page.render(heads, found, captions), encoding="utf-8")
    return [PAGE, *names, "heads.png", "footprint.png"]
