"""`NAME.sites.json`: what every attention call of a clip cost, and a few plans to look at."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jali.integration.run import Run
from jali.integration.stats import CallRow, Stats
from jali.integration.transformer import AttentionCall
from jali.methods import Method
from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.tokens.grid import Box, TokenGrid

VERSION = 1
# All plans of a file together; base64 makes four characters of three tokens.
PLAN_BYTES = 56_000
PLANS = 4


@dataclass
class PlanRecorder:
    """Keeps the plans of two layers in the middle of the sparse steps, for one clip at a time.

    Plans stay on the device until `plans` is asked for, so that watching costs no time.
    """

    method: Method
    check: Callable[[TokenGrid], None] | None = None  # asked once, of the first grid
    found: dict[int, tuple[Site, TokenGrid, BlockPlan]] = field(default_factory=dict)
    _asked: dict[tuple[int, int, int], tuple[int, frozenset[int]]] = field(default_factory=dict)

    def __call__(self, seen: AttentionCall) -> None:
        if self.check is not None and isinstance(seen.grid, TokenGrid):
            self.check(seen.grid)
            self.check = None
        plan, site = seen.result.executed, seen.site
        if plan is None or not isinstance(seen.grid, TokenGrid) or site.branch == "uncond":
            return
        step, layers = self._choice(site, seen.q.shape[2])
        if site.step == step and site.layer in layers and seen.transformer == "transformer":
            self.found.setdefault(site.layer, (site, seen.grid, plan))

    def _choice(self, site: Site, tokens: int) -> tuple[int, frozenset[int]]:
        key = site.steps, site.layers, tokens
        if key not in self._asked:
            active = [
                (step, layer)
                for step in range(site.steps)
                for layer in range(site.layers)
                if self.method.active(Site(step, site.steps, layer, site.layers), tokens)
            ]
            steps = sorted({step for step, _ in active}) or [0]
            step = steps[len(steps) // 2]
            layers = sorted({layer for at, layer in active if at == step}) or [0]
            n = len(layers)
            self._asked[key] = step, frozenset({layers[n // 3], layers[2 * n // 3]})
        return self._asked[key]

    def plans(self) -> list[dict[str, Any]]:
        """Of every site the cheapest and the dearest head, in the middle of the clip. Forgets."""
        picked = []
        for _, (site, grid, plan) in sorted(self.found.items()):
            box = video_of(grid)
            if box is None:
                continue
            heads = plan.levels.shape[1]
            costs = plan.costs[0].expand(heads)
            for head in dict.fromkeys((int(costs.argmin()), int(costs.argmax()))):
                picked.append((site, grid, plan, head))
        self.found.clear()
        each = PLAN_BYTES // max(1, min(len(picked), PLANS))
        return [_footprint(*what, each) for what in picked[:PLANS]]


def video_of(grid: TokenGrid) -> Box | None:
    """The first box of a sequence: the video, or the image that is made."""
    return next((s for s in grid.segments if isinstance(s, Box)), None)


def record_text(run: Run, stats: Stats, plans: Sequence[dict[str, Any]]) -> str:
    call = run.transformers[0].call
    box = call.boxes[0] if call is not None and call.boxes else None
    rows = stats.rows
    return json.dumps(
        {
            "version": VERSION,
            "grid": None if box is None else list(box.shape),
            "layers": max((row.layer + 1 for row in rows), default=0),
            "steps": max((row.step + 1 for row in rows), default=0),
            "heads": max((len(row.heads) for row in rows), default=0),
            "rows": [_row(row) for row in rows],
            "plans": list(plans),
        },
        separators=(",", ":"),
    )


def _row(row: CallRow) -> dict[str, Any]:
    names = ("transformer", "layer", "step", "branch", "cost", "heads", "backend", "reason")
    rounded = {"cost": round(row.cost, 5), "heads": [round(cost, 4) for cost in row.heads]}
    # What the call would be densely: means over calls are weighted by it.
    return {name: getattr(row, name) for name in names} | rounded | {"dense_work": row.dense_work}


def _footprint(
    site: Site, grid: TokenGrid, plan: BlockPlan, head: int, most: int
) -> dict[str, Any]:
    """What one query block reads, token by token. A large grid is thinned to `most` bytes."""
    layout = plan.layout
    start, box = next((s, b) for s, b in grid.spans() if isinstance(b, Box))
    span = slice(start, start + box.tokens)
    middle = start + min(box.tokens // 2 + box.width // 2, box.tokens - 1)
    q_slots, k_slots = plan.query_tokens(head).argsort(), plan.key_tokens(head).argsort()
    query = int(q_slots[middle]) // plan.blocks.q
    levels = plan.levels[0, head, query].repeat_interleave(plan.blocks.k)[: layout.k.tokens]
    levels = levels[k_slots][span]
    own = (q_slots // plan.blocks.q == query)[span]
    thin = 1
    while -(-box.height // thin) * -(-box.width // thin) * box.frames * 4 / 3 > most:
        thin += 1
    levels, own = (x.view(box.shape)[:, ::thin, ::thin].contiguous().cpu() for x in (levels, own))
    return {
        "layer": site.layer,
        "step": site.step,
        "branch": site.branch,
        "grid": list(levels.shape),
        "head": head,
        "query_block": query,
        "query_tokens": _runs(own.flatten()),
        "levels": base64.b64encode(levels.to(torch.uint8).numpy().tobytes()).decode(),
    }


def _runs(marked: Tensor) -> list[list[int]]:
    """[first, count] of every run of true values."""
    padded = torch.nn.functional.pad(marked.to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().flatten().view(-1, 2)
    return [[int(first), int(end - first)] for first, end in edges]
