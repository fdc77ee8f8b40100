"""How far single layers of nano are from dense by the estimates that `rd` can plan from.

    python -m benchmarks.estimates --output benchmarks/results/estimates-nano-cpu.json

q, k and v of some layers and steps of dense clips are captured once (`--captures` keeps them), then
every method plans for them at each budget. An error is ‖out − dense‖ / ‖dense‖ of a call's output
on some rows of every query block, written out; what planning takes stands beside it. Single layers
do not decide about clips: see nano_quality.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.captured import BLOCK, GRID, about, arguments, asked_calls
from jali import Entropy, Method, RateDistortion, Tables
from jali.evaluation.inspection import Capture
from jali.files import write_json
from jali.kernels.lists import MEAN, group_size
from jali.methods.method import Query
from jali.methods.sampling import jittered_positions
from jali.tokens.layout import BlockLayout, Blocks

BUDGETS = (0.5, 0.3, 0.15, 0.08)
# Rows of every query block on which errors are measured; not those that were planned by.
CHECKED = 4
RD = RateDistortion(levels=(2, 4, 8, "mean", "skip"))
METHODS: dict[str, Method] = {
    "entropy": Entropy(q_block=BLOCK, k_block=BLOCK),
    **{f"samples, {n} rows": replace(RD, samples=n) for n in (2, 4, 8, 16)},
    **{
        f"{estimate}, {n} rows": replace(RD, samples=n, estimate=estimate)
        for estimate in ("statistics", "mixed")
        for n in (4, 8, 16)
    },
    "all rows (the bound)": replace(RD, samples=BLOCK),
}


class Rows:
    """What some rows of a call read of each key block at every level: the output of any plan.

    [1, H, rows of a block, M, N, D + 1] for each level, the last being mass; dense is in full.
    """

    def __init__(self, call: Capture) -> None:
        q, k, v = call.q, call.k, call.v
        at = jittered_positions(GRID.tokens, BLOCK, CHECKED, 1000, call.site, q.device)  # [M, rows]
        rows = q[:, :, at.T] * call.scale  # [1, H, rows, M, D]
        self.parts, peak = {}, None
        for level in (1, 2, 4, 8, MEAN):
            size = group_size(level, BLOCK)
            keys, values = (x.unflatten(2, (-1, BLOCK // size, size)).mean(4) for x in (k, v))
            logits = torch.einsum("bhrmd,bhngd->bhrmng", rows, keys)
            peak = logits.amax((-2, -1), keepdim=True) if peak is None else peak
            weights = (logits - peak).exp_() * size
            values = F.pad(values, (0, 1), value=1.0)
            self.parts[level] = torch.einsum("bhrmng,bhngd->bhrmnd", weights, values)
        self.dense = _output(self.parts[1])

    def error(self, levels: torch.Tensor) -> float:
        """‖out − dense‖ / ‖dense‖ of a plan's levels [1, H, M, N]."""
        read = sum(
            part * (levels == level)[:, :, None, ..., None] for level, part in self.parts.items()
        )
        wrong = _output(read) - self.dense
        return float(wrong.norm() / self.dense.norm())


def _output(parts: Any) -> torch.Tensor:
    whole = parts.sum(-2)
    return whole[..., :-1] / whole[..., -1:]


def errors(call: Capture) -> Iterator[tuple[str, float, float, float]]:
    """(method, budget, achieved cost, error) of one call."""
    seen = Rows(call)
    for name, method in METHODS.items():
        tables, layout = Tables(), _layout(method)  # one table for all budgets
        query = Query(call.q, call.k, layout, call.site, call.scale, v=call.v, tables=tables)
        for budget in BUDGETS:
            plan = method.with_budget(budget).plan(query)
            yield name, budget, plan.cost, seen.error(plan.levels)


def _layout(method: Method) -> BlockLayout:
    blocks = Blocks(BLOCK, BLOCK)
    return method.layout(GRID, None, None, method.blocks(blocks), torch.device("cpu"))


def main() -> None:
    asked = arguments(__doc__)
    planning = {name: each.planning_share(_layout(each)) for name, each in METHODS.items()}
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    result: dict[str, Any] = about(asked) | {"calls": 0, "rows": []}
    for call in asked_calls(asked):
        for name, budget, cost, error in errors(call):
            found.setdefault((name, budget), []).append((cost, error))
        result["calls"] += 1
        result["rows"] = [
            {
                "method": name, "planning": planning[name], "budget": budget,
                "cost": fmean(cost for cost, _ in own), "error": fmean(error for _, error in own),
                "errors": [round(error, 6) for _, error in own],
            }
            for (name, budget), own in found.items()
        ]  # fmt: skip
        write_json(asked.output, result, sort_keys=False)
        print(result["calls"], call.site.step, call.site.layer, flush=True)


if __name__ == "__main__":
    main()
