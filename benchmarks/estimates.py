"""How far single layers of nano are from dense by the estimates that `rd` can plan from.

    python -m benchmarks.estimates --output benchmarks/results/estimates-nano-cpu.json

q, k and v of some layers and steps of dense clips are captured once (`--captures` keeps them), then
every method attends to them at each budget. An error is ‖out − dense‖ / ‖dense‖ of a call, and what
planning takes stands beside it. Single layers do not decide about clips: see nano_quality.py.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F

from jali import (
    Entropy,
    Method,
    RateDistortion,
    Site,
    Tables,
    TokenGrid,
    __version__,
    attend,
    load_pipeline,
)
from jali.evaluation.inspection import capture
from jali.files import write_json
from jali.generation.settings import Settings
from training.scene import prompts

BUDGETS = (0.5, 0.3, 0.15, 0.08)
SIZE = {"height": 192, "width": 320, "num_frames": 37}
GRID, BLOCK, STEPS = TokenGrid.video(10, 24, 40), 128, 12
METHODS: dict[str, Method] = {
    "entropy": Entropy(q_block=BLOCK, k_block=BLOCK),
    **{f"samples, {n} rows": RateDistortion(samples=n) for n in (2, 4, 8, 16)},
    **{
        f"{estimate}, {n} rows": RateDistortion(samples=n, estimate=estimate)
        for estimate in ("statistics", "mixed")
        for n in (4, 8, 16)
    },
    "all rows (the bound)": RateDistortion(samples=BLOCK),
}


def captured(folder: Path, count: int, steps: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """The calls of some held-out prompts, from the folder where they lie there already."""
    pipe = None
    for i, text in enumerate(prompts(count)):
        file = folder / f"prompt{i}.pt"
        if not file.exists():
            pipe = pipe or load_pipeline("nano", device="cpu", dtype=torch.float32)
            asked = Settings("nano", method="dense", steps=STEPS, guidance=4.0, seed=i, **SIZE)
            calls = capture(pipe, asked.resolve(), text, range(8), steps)
            kept = [
                {
                    "step": c.site.step, "layer": c.site.layer, "q": c.q, "k": c.k, "v": c.v,
                    "scale": c.scale,
                }
                for c in calls
            ]  # fmt: skip
            torch.save(kept, file)
        yield from torch.load(file, mmap=True)


def errors(call: dict[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    """(method, budget, achieved cost, error) of one call."""
    q, k, v = call["q"], call["k"], call["v"]
    dense = F.scaled_dot_product_attention(q, k, v, scale=call["scale"])
    site = Site(call["step"], STEPS, call["layer"], 8)
    for name, method in METHODS.items():
        tables = Tables()  # one for all budgets
        for budget in BUDGETS:
            asked = method.with_budget(budget)
            found = attend(
                q, k, v, method=asked, grid=GRID, site=site, scale=call["scale"], tables=tables
            )
            assert found.plan is not None
            yield name, budget, found.plan.cost, float((found.out - dense).norm() / dense.norm())


def share(method: Method) -> float:
    """Of planning, in a dense call."""
    layout = method.layout(GRID, None, None, method.blocks(None), torch.device("cpu"))  # type: ignore[arg-type]
    return method.planning_share(layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--captures", type=Path, help="a folder that keeps q, k and v")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--steps", default="2,5,8")
    parser.add_argument("--layers", default="0,2,5,7")
    asked = parser.parse_args()
    steps, layers = ([int(x) for x in given.split(",")] for given in (asked.steps, asked.layers))
    folder = asked.captures or Path(tempfile.mkdtemp())
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    result = {
        "machine": {
            "device": platform.machine(), "jali": __version__, "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "size": SIZE, "tokens": GRID.tokens, "steps": steps, "of_steps": STEPS, "layers": layers,
        "prompts": list(prompts(asked.prompts)), "calls": 0, "rows": [],
    }  # fmt: skip
    for call in captured(folder, asked.prompts, tuple(steps)):
        if call["step"] not in steps or call["layer"] not in layers:
            continue
        for name, budget, cost, error in errors(call):
            found.setdefault((name, budget), []).append((cost, error))
        result["calls"] += 1
        result["rows"] = [
            {
                "method": name, "planning": share(METHODS[name]), "budget": budget,
                "cost": fmean(cost for cost, _ in own), "error": fmean(error for _, error in own),
                "errors": [round(error, 6) for _, error in own],
            }
            for (name, budget), own in found.items()
        ]  # fmt: skip
        write_json(asked.output, result, sort_keys=False)
        print(result["calls"], call["step"], call["layer"], flush=True)


if __name__ == "__main__":
    main()
