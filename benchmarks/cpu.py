"""CPU numbers: the `torch` backend and whole `sparse_attention` calls against dense attention.

    python benchmarks/cpu.py                     # everything, about ten minutes on two cores
    python benchmarks/cpu.py --repeats 3 --skip growth

Ratios of medians of interleaved runs in one process. Beside every speed stands its error: of the
execution (against the fp32 reference on the same plan) and, for whole calls, of the method
(against dense attention). Memory is measured in fresh processes. Results go to
benchmarks/results/cpu-<name>.json, from which the tables in README and docs are made.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jali import BlockPlan, TokenGrid, attend, block_layout, sparse_attention
from jali.backends import BACKENDS
from jali.evaluation.demo import make_heads
from jali.files import write_json
from jali.functional import _method as method_of  # the same value that sparse_attention builds

RESULTS = Path(__file__).parent / "results"
HEADS, DIM, TOKENS, GRID = 8, 64, 8192, (8, 32, 32)
SPARSITY = 0.7
TARGETS = {"kernel": {0.3: 2.7, 0.1: 8.0}, "whole": 2.2, "memory": 4.0}
TYPES = ("rf_v2", "ada_bsa", "entropy", "psa")
DEFAULTS = {
    "keep_sink": True,
    "keep_recent": True,
    "cdf_threshold": 1.0,
    "compat": False,
    "block_size": 128,
}


def gaussian(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in range(3))
    return q, k, v


def structured() -> tuple[Tensor, Tensor, Tensor]:
    """Heads that differ: local, temporal, frame, semantic, diffuse, sink."""
    heads = make_heads(GRID, HEADS, DIM)
    return heads.q, heads.k, heads.v


def random_plan(tokens: int, density: float) -> BlockPlan:
    """The same number of random key blocks for every query block of every head, 256×128."""
    layout = block_layout(TokenGrid.flat(tokens))
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(1, HEADS, layout.M, layout.N, generator=generator).argsort(-1)
    return BlockPlan.from_levels(order < max(1, round(density * layout.N)), layout)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def execute(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Tensor:
    return BACKENDS["torch"].attend(q, k, v, plan, DIM**-0.5)[0]


# Noise has no geometry: one frame, as in the image example. Structure is a video, whose first
# frame rf_v2 always reads: the cost is then above the budget.
GRIDS: dict[str, tuple[int, int, int] | None] = {"gaussian": None, "structured": GRID}


def whole(
    q: Tensor, k: Tensor, v: Tensor, sparse_type: str, grid: tuple[int, int, int] | None = GRID
) -> Tensor:
    return sparse_attention(
        q, k, v, head_num=HEADS, sparse_type=sparse_type, latent_shape_q=grid, sparsity=SPARSITY
    )


def interleaved(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, so that drift hits them all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out - wanted).norm() / wanted.norm())


def reference_output(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Tensor:
    """The plan executed by the reference, a head at a time (it writes the scores out)."""
    levels = plan.levels.expand(1, q.shape[1], -1, -1)
    layout = plan.layout
    outs = []
    for h in range(q.shape[1]):
        one = BlockPlan(layout, plan.ratios, map=levels[:, h : h + 1])
        parts = (side.arrange(x[:, h : h + 1]) for side, x in zip(
            (layout.q, layout.k, layout.k), (q, k, v), strict=True
        ))  # fmt: skip
        out, _ = BACKENDS["reference"].attend(*parts, one, DIM**-0.5)
        outs.append(layout.q.restore(out))
    return torch.cat(outs, dim=1)


def measure_kernel(repeats: int) -> list[dict[str, Any]]:
    q, k, v = gaussian(TOKENS)
    plans = {density: random_plan(TOKENS, density) for density in TARGETS["kernel"]}
    cases: dict[str, Callable[[], object]] = {"dense": lambda: dense(q, k, v)}
    for density, plan in plans.items():
        cases[str(density)] = lambda plan=plan: execute(q, k, v, plan)
    medians = interleaved(cases, repeats)
    return [
        {
            "case": "backend torch, 256×128",
            "asked": density,
            "cost": plan.cost,
            "seconds": medians[str(density)],
            "dense_seconds": medians["dense"],
            "speed_up": medians["dense"] / medians[str(density)],
            "target": TARGETS["kernel"][density],
            "error_execution": relative_error(
                execute(q, k, v, plan), reference_output(q, k, v, plan)
            ),
        }
        for density, plan in plans.items()
    ]


def measure_whole(repeats: int, inputs: str) -> list[dict[str, Any]]:
    q, k, v = gaussian(TOKENS) if inputs == "gaussian" else structured()
    cases: dict[str, Callable[[], object]] = {"dense": lambda: dense(q, k, v)}
    for name in TYPES:
        cases[name] = lambda name=name: whole(q, k, v, name, GRIDS[inputs])
    medians = interleaved(cases, repeats)
    exact = dense(q, k, v)
    rows = []
    for name in TYPES:
        method = method_of(SimpleNamespace(sparse_type=name, sparsity=SPARSITY, **DEFAULTS))
        found = attend(q, k, v, method=method, grid=GRIDS[inputs])
        assert found.plan is not None
        assert found.executed is not None
        out = whole(q, k, v, name, GRIDS[inputs])
        rows.append(
            {
                "case": f"sparse_attention {name}",
                "inputs": inputs,
                "asked": round(1 - SPARSITY, 6),
                "cost": found.executed.cost,
                "density": found.executed.density,
                "seconds": medians[name],
                "dense_seconds": medians["dense"],
                "speed_up": medians["dense"] / medians[name],
                "target": None if name == "psa" else TARGETS["whole"],
                "error_execution": relative_error(out, reference_output(q, k, v, found.executed)),
                "error_method": relative_error(out, exact),
            }
        )
    return rows


def measure_growth(repeats: int) -> list[dict[str, Any]]:
    """Seconds against length at density 0.3: dense, the backend alone, entropy as a whole."""
    rows = []
    for tokens in (2048, 4096, 8192, 16384):
        q, k, v = gaussian(tokens)
        plan = random_plan(tokens, 0.3)
        cases: dict[str, Callable[[], object]] = {
            "dense": lambda q=q, k=k, v=v: dense(q, k, v),
            "torch": lambda q=q, k=k, v=v, plan=plan: execute(q, k, v, plan),
            "entropy": lambda q=q, k=k, v=v: sparse_attention(
                q, k, v, head_num=HEADS, sparse_type="entropy", sparsity=SPARSITY
            ),
        }
        rows.append({"tokens": tokens, **interleaved(cases, max(1, repeats // 2))})
    return rows


def measure_memory() -> list[dict[str, Any]]:
    """Peak extra memory of one call, the output included, in a fresh process each."""
    rows = []
    for case in ("dense", "torch 0.3", "torch 0.1", *TYPES):
        command = [sys.executable, __file__, "--memory-of", case]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        extra, q_bytes = json.loads(done.stdout)
        rows.append(
            {
                "case": case,
                "extra_bytes": extra,
                "q_bytes": q_bytes,
                "times_q": extra / q_bytes,
                "target": None if case == "dense" else TARGETS["memory"],
            }
        )
    return rows


def memory_of(case: str) -> None:
    """Print [peak extra bytes, bytes of q]: the high-water mark above what was there before."""
    q, k, v = gaussian(TOKENS)
    if case.startswith("torch"):
        plan, small = random_plan(TOKENS, float(case.split()[1])), random_plan(512, 0.5)
        assert plan.lists  # made by planning, not by attention
        execute(*gaussian(512), small)  # libraries and thread pools come up here
        call: Callable[[], object] = lambda: execute(q, k, v, plan)  # noqa: E731
    elif case == "dense":
        dense(*gaussian(512))
        call = lambda: dense(q, k, v)  # noqa: E731
    else:
        sparse_attention(*gaussian(512), head_num=HEADS, sparse_type=case, sparsity=SPARSITY)
        call = lambda: whole(q, k, v, case)  # noqa: E731
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    out = call()
    print(json.dumps([_status("VmHWM") - before, q.numel() * q.element_size()]))
    del out


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def machine() -> dict[str, Any]:
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.system(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="2threads", help="result file: cpu-NAME.json")
    parser.add_argument(
        "--skip", nargs="*", default=[], choices=("gaussian", "structured", "memory", "growth")
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        memory_of(options.memory_of)
        return
    result: dict[str, Any] = {
        "kind": "cpu",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jali", "torch", "numpy")},
        "shape": {"batch": 1, "heads": HEADS, "tokens": TOKENS, "head_dim": DIM, "grid": GRID},
        "dtype": "float32",
        "repeats": options.repeats,
        "baseline": "torch.nn.functional.scaled_dot_product_attention, dense, same tensors",
    }
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "kernel": lambda: measure_kernel(options.repeats),
        "gaussian": lambda: measure_whole(options.repeats, "gaussian"),
        "structured": lambda: measure_whole(options.repeats, "structured"),
        "memory": measure_memory,
        "growth": lambda: measure_growth(options.repeats),
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"cpu-{options.name}.json"
    result["whole"] = []
    for name, measure in sections.items():
        if name in options.skip:
            continue
        rows = measure()
        report(name, rows)
        place = "whole" if name in ("gaussian", "structured") else name
        result[place] = result.get(place, []) + rows
        # A run that is cut short keeps what it has.
        write_json(file, result, sort_keys=False)
    print(f"written: {file}")


def report(section: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if section == "memory":
            print(f"memory {row['case']:12} {row['times_q']:5.2f} × q (target {row['target']})")
        elif section == "growth":
            print("growth", {k: round(x, 3) for k, x in row.items()})
        else:
            print(
                f"{row['case']:26} {section:10} asked {row['asked']:.2f} cost {row['cost']:.3f} "
                f"{row['seconds'] * 1e3:7.0f} ms {row['speed_up']:5.2f}× (target {row['target']}) "
                f"execution error {row['error_execution']:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
