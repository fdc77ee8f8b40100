"""The demonstration that needs no model: every method on one made-up layer, beside dense."""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
import torch.nn.functional as F

from jali.attend import Attended, attend
from jali.backends import BACKENDS
from jali.evaluation.demo.heads import MadeUpHeads
from jali.methods import METHODS, Dense
from jali.name import CONTROLS
from jali.planning.plan import BlockPlan
from jali.value import check_share
from jali.version import __version__

FULL, QUICK = (10, 24, 40), (6, 20, 40)
BUDGET = 0.25
PAGE = "index.html"
HEADINGS = ("method", "budget", "cost", "density", "error", "call ms", "plan ms", "speed-up")


@dataclass(frozen=True)
class MethodResult:
    """What came of one method. `error` is ‖out − dense‖ / ‖dense‖; times are medians.

    `planning` is everything but the attention itself: arranging, scoring, selecting, restoring; 0
    where that is too little to be timed here.
    """

    method: str
    budget: float
    cost: float
    density: float
    error: float
    seconds: float
    planning: float
    speed_up: float

    def cells(self) -> tuple[str, ...]:
        """In words, in the order of HEADINGS."""
        return (
            self.method,
            f"{self.budget:.2f}",
            f"{self.cost:.3f}",
            f"{self.density:.3f}",
            f"{self.error:.1%}",
            f"{self.seconds * 1e3:,.0f}",
            f"{self.planning * 1e3:,.0f}" if self.planning else "–",
            f"{self.speed_up:.2f}×",
        )


@dataclass(frozen=True, eq=False)
class MethodComparison:
    """All methods at one asked budget on the same heads."""

    heads: MadeUpHeads
    dense_seconds: float
    rows: tuple[MethodResult, ...]
    plans: dict[str, BlockPlan]

    def to_dict(self) -> dict[str, Any]:
        """Everything the table says, and what it was measured on."""
        return {
            "jali": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "grid": str(self.heads.grid),
            "tokens": self.heads.grid.tokens,
            "heads": list(self.heads.kinds),
            "head_dim": self.heads.q.shape[-1],
            "budget": self.rows[0].budget,
            "dense_seconds": self.dense_seconds,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def compare_methods(heads: MadeUpHeads, budget: float, repeats: int = 3) -> MethodComparison:
    """Dense attention and every sparse method, timed in turn so that drift hits them all alike.

    Args:
        heads: q, k and v.
        budget: asked share of dense attention's work, above 0.
        repeats: calls that are timed, after one that is not.

    Example:
        >>> found = compare_methods(make_heads((4, 16, 16)), budget=0.25)
    """
    check_share("budget", budget)
    if budget == 0:
        raise ValueError("budget must be above 0 to compare anything, got 0")
    q, k, v = heads.q, heads.k, heads.v

    def call(name: str) -> Attended:
        method = METHODS[name]().with_budget(budget)
        return attend(q, k, v, method=method, grid=heads.grid)

    dense = F.scaled_dot_product_attention(q, k, v)
    found = {name: call(name) for name, kind in METHODS.items() if kind is not Dense}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(repeats):
        alone = timeit(lambda: F.scaled_dot_product_attention(q, k, v), number=1)
        times["dense", "call"].append(alone)
        for name, result in found.items():
            times[name, "call"].append(timeit(functools.partial(call, name), number=1))
            times[name, "attention"].append(_attention_seconds(heads, result))
    seconds = {what: statistics.median(taken) for what, taken in times.items()}
    rows, plans = [], {}
    for name, result in found.items():
        assert result.executed is not None
        assert result.plan is not None
        plans[name], whole = result.plan, seconds[name, "call"]
        rows.append(
            MethodResult(
                method=name,
                budget=budget,
                cost=result.executed.cost,
                density=result.executed.density,
                error=float((result.out - dense).norm() / dense.norm()),
                seconds=whole,
                planning=max(0.0, whole - seconds[name, "attention"]),
                speed_up=seconds["dense", "call"] / whole,
            )
        )
    return MethodComparison(heads, seconds["dense", "call"], tuple(rows), plans)


def draw(folder: Path, found: MethodComparison) -> list[str]:
    """The page and the pictures, by name; nothing where matplotlib or jinja2 is not installed."""
    if any(importlib.util.find_spec(package) is None for package in ("matplotlib", "jinja2")):
        return []
    from jali.evaluation.inspection.plan_picture import heads_figure, maps_figure
    from jali.evaluation.report.template import render

    names = []
    for method, plan in found.plans.items():
        names.append(f"plan-{method}.png")
        plan.figure().savefig(folder / names[-1], dpi=110, bbox_inches="tight")
    kinds, pyramid = found.heads.kinds, found.plans["psa"]
    middle = pyramid.layout.M // 2
    figures = {
        "heads.png": maps_figure(found.plans, kinds),
        "footprint.png": heads_figure(pyramid, range(len(kinds)), kinds, middle),
    }
    pictures = {}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
        pictures[name] = base64.b64encode((folder / name).read_bytes()).decode()
    page = render(
        "jali.evaluation.demo",
        "tensors.html",
        heads=found.heads,
        dense_seconds=found.dense_seconds,
        headings=HEADINGS,
        rows=[row.cells() for row in found.rows],
        controls=CONTROLS,
        maps=[_map(method, plan, kinds) for method, plan in found.plans.items()],
        pictures=pictures,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")
    return [PAGE, *names, *figures]


def _map(method: str, plan: BlockPlan, kinds: Sequence[str]) -> dict[str, Any]:
    """What the page draws of a plan: a level for every block pair of every head."""
    heads = plan.levels[0].expand(len(kinds), -1, -1)
    costs = plan.costs[0].expand(len(kinds)).tolist()
    return {
        "method": method,
        "rows": heads.shape[1],
        "columns": heads.shape[2],
        "heads": [
            {
                "kind": kind,
                "cost": f"{cost:.3f}",
                "levels": base64.b64encode(head.cpu().numpy().tobytes()).decode(),
            }
            for kind, cost, head in zip(kinds, costs, heads, strict=True)
        ],
    }


def _attention_seconds(heads: MadeUpHeads, found: Attended) -> float:
    """The time of the backend alone, given the plan and arranged tensors."""
    plan = found.executed
    assert plan is not None
    q, k, v = plan.arrange(heads.q, heads.k, heads.v)
    scale = q.shape[-1] ** -0.5
    return timeit(lambda: BACKENDS[found.backend].attend(q, k, v, plan, scale), number=1)
