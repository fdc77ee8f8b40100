"""How far single layers of nano are from dense by every method, at equal achieved cost.

    python -m benchmarks.layers --output benchmarks/results/layers-nano-cpu.json

q, k and v of some layers and steps of dense clips are captured once (`--captures` keeps them), as
in captured.py. Every method and both controls plan for them through `jali.attend`, each asked for
what makes its achieved cost the wanted one. An error is ‖out − dense‖ / ‖dense‖ of a call's whole
output. What a method would keep from an earlier step (`rd`, `mass`, `svg2`) it makes from the
call's own numbers. Single layers do not decide about clips: see `jali arena`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from statistics import fmean
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.captured import BLOCK, about, arguments, asked_calls
from jali import Blocks, Method, Tables, attend, make_method
from jali.evaluation.arena.match import matched
from jali.evaluation.inspection import Capture
from jali.evaluation.inspection.judge import planned
from jali.files import write_json
from jali.methods import METHODS, Dense

COSTS = (0.48, 0.32, 0.16)  # 36, 24 and 12 of 75 blocks, so that whole blocks round for nobody


def chosen() -> Iterator[Method]:
    """Every method with blocks of 128×128; one whose own blocks are others with those too."""
    same = Blocks(BLOCK, BLOCK)
    for name, kind in METHODS.items():
        if kind is Dense:
            continue
        known = {each.name for each in fields(kind)} & {"q_block", "k_block", "block_size"}
        yield make_method(name, **dict.fromkeys(known, BLOCK))
        own = make_method(name)
        if own.blocks(same) != same:
            yield own


def scores(call: Capture) -> Iterator[dict[str, Any]]:
    """Every method on one call, at every cost."""
    dense = F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale)
    for method in chosen():
        tables = Tables()  # what a method looked at serves every cost
        for cost in COSTS:
            yield score(method, call, cost, dense, tables)


def score(
    method: Method, call: Capture, cost: float, dense: Tensor, tables: Tables
) -> dict[str, Any]:
    """What a method errs by where it costs this much, as nearly as blocks allow."""
    _, ((asked, _), *_) = matched(
        cost, lambda share: planned(method.with_budget(share), call, tables)
    )
    found = attend(
        call.q, call.k, call.v, method=method.with_budget(asked), grid=call.grid, site=call.site,
        scale=call.scale, tables=tables,
    )  # fmt: skip
    assert found.executed is not None
    return {
        "method": method.name, "blocks": str(found.executed.blocks),
        "planning": method.planning_share(found.executed.layout), "cost": cost,
        "achieved": found.executed.cost,
        "error": float((found.out - dense).norm() / dense.norm()),
    }  # fmt: skip


def main() -> None:
    asked = arguments(__doc__)
    result: dict[str, Any] = about(asked) | {"calls": 0, "rows": []}
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for call in asked_calls(asked):
        for made in scores(call):
            key = tuple(made[name] for name in ("method", "blocks", "planning", "cost"))
            found.setdefault(key, []).append(made)
        result["calls"] += 1
        result["heads"], result["head_dim"] = call.q.shape[1], call.q.shape[3]
        result["rows"] = [
            {
                "method": method, "blocks": blocks, "planning": planning, "cost": cost,
                "achieved": round(fmean(made["achieved"] for made in own), 5),
                "error": round(fmean(made["error"] for made in own), 6),
                "errors": [round(made["error"], 6) for made in own],
            }
            for (method, blocks, planning, cost), own in found.items()
        ]  # fmt: skip
        write_json(asked.output, result, sort_keys=False)
        print(result["calls"], call.site.step, call.site.layer, flush=True)


if __name__ == "__main__":
    main()
