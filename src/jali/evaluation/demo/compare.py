"""Every method on the same tensors at the same asked budget, beside dense attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from jali.attend import Attended, attend
from jali.backends import BACKENDS
from jali.evaluation.demo.heads import MadeUpHeads
from jali.methods import METHODS, Dense
from jali.planning.budget import check_share
from jali.planning.plan import BlockPlan


@dataclass(frozen=True)
class Row:
    """What came of one method. `error` is ‖out − dense‖ / ‖dense‖; times are medians.

    `planning` is everything but the attention itself: arranging, scoring, selecting, restoring.
    """

    method: str
    budget: float
    cost: float
    density: float
    error: float
    seconds: float
    planning: float
    speed_up: float


@dataclass(frozen=True, eq=False)
class Comparison:
    dense_seconds: float
    rows: tuple[Row, ...]
    plans: dict[str, BlockPlan]


def compare(heads: MadeUpHeads, budget: float, repeats: int = 3) -> Comparison:
    """Dense attention and every sparse method, timed in turn so that drift hits them all alike."""
    check_share("budget", budget)
    if budget == 0:
        raise ValueError("budget must be above 0 to compare anything, got 0")
    q, k, v = heads.q, heads.k, heads.v
    methods = {
        name: kind().with_budget(budget) for name, kind in METHODS.items() if kind is not Dense
    }
    calls: dict[str, Callable[[], Attended]] = {
        name: lambda m=method: attend(q, k, v, method=m, grid=heads.grid)  # type: ignore[misc]
        for name, method in methods.items()
    }
    dense = F.scaled_dot_product_attention(q, k, v)
    first = {name: call() for name, call in calls.items()}
    dense_times: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in calls}
    attend_times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        dense_times.append(seconds(lambda: F.scaled_dot_product_attention(q, k, v)))
        for name, call in calls.items():
            times[name].append(seconds(call))
            attend_times[name].append(_attention_alone(heads, first[name]))
    baseline = statistics.median(dense_times)
    rows = tuple(
        _row(name, budget, first[name], dense, baseline, times[name], attend_times[name])
        for name in calls
    )
    return Comparison(baseline, rows, dict(_plans(first)))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _row(
    name: str,
    budget: float,
    found: Attended,
    dense: Tensor,
    baseline: float,
    times: list[float],
    attend_times: list[float],
) -> Row:
    assert found.executed is not None
    whole = statistics.median(times)
    return Row(
        method=name,
        budget=budget,
        cost=found.executed.cost,
        density=found.executed.density,
        error=float((found.out - dense).norm() / dense.norm()),
        seconds=whole,
        planning=max(0.0, whole - statistics.median(attend_times)),
        speed_up=baseline / whole,
    )


def _attention_alone(heads: MadeUpHeads, found: Attended) -> float:
    """The time of the backend alone, given the plan and arranged tensors."""
    plan = found.executed
    assert plan is not None
    layout = plan.layout
    q, k, v = (layout.q.arrange(heads.q), layout.k.arrange(heads.k), layout.k.arrange(heads.v))
    scale = q.shape[-1] ** -0.5
    return seconds(lambda: BACKENDS[found.backend].attend(q, k, v, plan, scale))


def _plans(found: dict[str, Attended]) -> Iterator[tuple[str, BlockPlan]]:
    for name, attended in found.items():
        assert attended.plan is not None
        yield name, attended.plan
