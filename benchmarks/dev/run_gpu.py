"""Whole runs of 50 steps with falling budgets, on the GPU at hand: transformer calls are timed at a
few budgets and added up along the curve; one run is made step by step and checks the sum.

    PYTHONPATH=src:. OUT=/tmp/out python benchmarks/dev/run_gpu.py [480p 720p …] [--seconds 200]
    PYTHONPATH=src:. python benchmarks/dev/run_gpu.py --toy                       # any machine

Models, weights and dense times are those of `wan_gpu.py`. Random weights would make tables of
errors like no real ones: rd makes its table, which takes its time, and then chooses from errors
drawn from those of nano's own runs. $OUT/runs-h200.json is written anew after every row.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parent))

import wan_gpu
from wan_gpu import DENSE, P480, P720, Bench, Subject, applied, failed, loop, timed, wan, wan_model

from benchmarks.run_tables import along
from jali import load_pipeline, sparse_processor_mode
from jali.methods import Entropy, Method, Query, RateDistortion, Schedule
from jali.planning.budget import Budget
from jali.planning.curve import Curve
from jali.planning.distortion import ErrorTable
from jali.planning.plan import LEVELS, SKIP
from jali.planning.tradeoff import with_left

STEPS = 50
TOTALS = (0.25, 0.39, 0.5)
ESA_TOTAL = 0.54
SOME = ("entropy", "rd", "rd, no probes")  # where a call takes seconds
MANY, FEW = (0.75, 0.5, 0.3, 0.2, 0.1, 0.03), (0.7, 0.4, 0.2, 0.08, 0.03)
BUDGETS = {"480p": MANY, "720p": FEW, "14b": FEW, "hunyuan": FEW, "cogvideox": MANY}
CODES = tuple(level for level in LEVELS if level != 1)


@dataclass(frozen=True)
class Watched(RateDistortion):
    """Keeps the tables that it makes."""

    seen: ClassVar[list[ErrorTable]] = []

    def table(self, query: Query) -> ErrorTable:
        found = super().table(query)
        if query.site.step:
            self.seen.append(found)
        return found


@dataclass(frozen=True)
class LikeNano(RateDistortion):
    """Makes its tables, and chooses by errors drawn from `source`."""

    source: ClassVar[ErrorTable]
    drawn: ClassVar[dict[Any, ErrorTable]] = {}

    def table(self, query: Query) -> ErrorTable:
        made = super().table(query)
        key = made.codes.shape, self.costs
        if key not in self.drawn:
            B, H, M, N, _ = made.codes.shape
            dice = torch.Generator(made.codes.device).manual_seed(0)
            source = self.source.codes.flatten(0, 1).flatten(1, 2)  # [heads, pairs, levels]
            head = torch.randint(len(source), (B * H, 1), generator=dice, device=dice.device)
            pair = torch.randint(
                source.shape[1], (B * H, M * N), generator=dice, device=dice.device
            )
            wanted = torch.tensor([CODES.index(level) for level in self.codes])
            codes = source[head, pair][..., wanted.to(dice.device)].view(B, H, M, N, -1)
            top = self.source.top.flatten()[head].view(B, H)
            found = ErrorTable(codes.contiguous(), top.contiguous(), self.codes)
            self.drawn[key] = with_left(
                found, query.layout, query.padding, costs=self.costs_of(query)
            )
        return self.drawn[key]


def nano_errors(bench: Bench) -> ErrorTable:
    """Of all levels, of some layers of the middle of a run."""
    if bench.toy:
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(1, 255, (1, 2, 8, 8, len(CODES)), generator=generator)
        return ErrorTable(codes.sort(-1).values.byte(), torch.zeros(1, 2), CODES)
    pipe = load_pipeline("nano", device="cuda", dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    with sparse_processor_mode(pipe, method=Watched(), total=0.45):
        pipe(
            ["a large red striped ball moves right over a grey hilly background"],
            height=192, width=320, num_frames=37, num_inference_steps=12, output_type="latent",
        )  # fmt: skip
    some = [table for table in Watched.seen if table.levels == CODES][::16]
    codes, top = torch.cat([t.codes for t in some]), torch.cat([t.top for t in some])
    Watched.seen.clear()
    return ErrorTable(codes.clone(), top.clone(), CODES)


def methods() -> dict[str, Method]:
    return {
        "entropy": Entropy(Budget(0.5)),
        "entropy, 64 probes": Entropy(Budget(0.5), probes=64),
        "rd": LikeNano(),
        "rd, 8 samples": LikeNano(samples=8),
        "rd, no probes": LikeNano(probes=0),
    }


def layers_of(subject: Subject) -> int:
    """Layers with self-attention."""
    lists = ("blocks", "transformer_blocks", "single_transformer_blocks")
    return sum(len(getattr(subject.model, name, ())) for name in lists)


def forward(bench: Bench, subject: Subject, step: int) -> float:
    return timed(bench, lambda: subject.forward(1000.0 - 20.0 * step))


def step_times(
    bench: Bench, subject: Subject, method: Method, budgets: tuple[float, ...]
) -> dict[str, Any]:
    """Milliseconds of transformer calls at the budgets with kept tables, and what the call that
    makes them takes more."""
    kept: dict[float, float] = {}
    more, costs = [], {}
    for budget in budgets:
        with applied(subject, Schedule(method.with_budget(budget)), steps=STEPS) as handle:
            first = forward(bench, subject, 0)
            if budget == budgets[0]:
                first = None  # it may have compiled
            later = [forward(bench, subject, step) for step in (1, 2)]
            handle.run.check()
            kept[budget] = statistics.median(later)
            if first is not None:
                more.append(first - kept[budget])
            rows = [row for row in handle.stats().rows if row.cost is not None]
            costs[budget] = statistics.mean(row.cost for row in rows) if rows else None
    return {"ms": kept, "table_ms": statistics.median(more), "costs": costs}


def measure(bench: Bench, subject: Subject, budgets: tuple[float, ...], all_kinds: bool) -> None:
    layers = layers_of(subject)
    kinds = {n: m for n, m in methods().items() if all_kinds or n in SOME}
    for method in (DENSE, *kinds.values()):  # compile and warm up
        with applied(subject, method, steps=STEPS):
            forward(bench, subject, 0)
    dense_times = []
    for name, method in kinds.items():
        if bench.left < 20:
            bench.say(f"{subject.name}: {name} skipped, the time is up")
            continue
        with applied(subject, DENSE):
            dense_times += [forward(bench, subject, step) for step in (0, 1)]
        try:
            found = step_times(bench, subject, method, budgets)
        except Exception as error:
            failed(bench, subject, name, error)
            continue
        dense = statistics.median(dense_times)
        tables = 4 if isinstance(method, RateDistortion) else 0
        runs = {}
        for total in TOTALS:
            curve = [row[0] for row in Curve(total).budgets(STEPS, 1)]
            ms = sum(along(found["ms"], dense, curve)) + tables * found["table_ms"]
            runs[str(total)] = {"ms": ms, "speedup": STEPS * dense / ms}
        if not tables:  # a fifth of the steps and layer 0 dense, the rest alike
            rest = (ESA_TOTAL - 0.2 - 0.8 / layers) / (0.8 * (1 - 1 / layers))
            (sparse,) = along(found["ms"], dense, [rest])
            sparse += (dense - sparse) / layers
            ms = STEPS * (0.2 * dense + 0.8 * sparse)
            runs["ESA's schedule, 0.54"] = {"ms": ms, "speedup": STEPS * dense / ms}
        bench.add(
            part="run", model=subject.name, tokens=subject.tokens, layers=layers, method=name,
            dense_ms=dense, dense_times=[round(t, 2) for t in dense_times], steps=STEPS,
            step_ms={str(b): t for b, t in found["ms"].items()}, table_ms=found["table_ms"],
            costs={str(b): c for b, c in found["costs"].items()}, runs=runs,
        )  # fmt: skip
    if all_kinds and bench.left > 25:
        whole_run(bench, subject, statistics.median(dense_times))


def whole_run(bench: Bench, subject: Subject, dense: float) -> None:
    """All steps of one run, one after the other."""
    method = Schedule(methods()["rd"], curve=Curve(0.39))
    with applied(subject, method, steps=STEPS) as handle:
        ms = timed(bench, lambda: loop(subject, STEPS, lambda: None))
        cost = handle.stats().cost
    bench.add(
        part="whole run", model=subject.name, tokens=subject.tokens, total=0.39, cost=cost,
        method="rd", ms=ms, dense_ms=dense, speedup=STEPS * dense / ms,
    )  # fmt: skip


def large_wan(bench: Bench) -> Subject:
    """Six of its forty layers: all are alike."""
    wan_gpu.WANS["14b, 6 layers"] = {
        "num_attention_heads": 40, "num_layers": 6, "ffn_dim": 13824,
    }  # fmt: skip
    return wan(bench, wan_model(bench, "14b, 6 layers"), "wan-14b-720p", *P720[1:])


SUBJECTS: dict[str, Callable[[Bench], Subject]] = {
    "480p": lambda bench: wan(bench, wan_model(bench), *P480),
    "720p": lambda bench: wan(bench, wan_model(bench), *P720),
    "14b": large_wan,
    "hunyuan": lambda bench: wan_gpu.hunyuan(bench, 2),  # six of its sixty layers
    "cogvideox": wan_gpu.cogvideox,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0)
    given = parser.parse_args()
    path = Path(os.environ.get("OUT", ".")) / "runs-h200.json"
    bench = Bench(given.toy, given.seconds, 3, False, path)
    torch._dynamo.config.recompile_limit = 64
    LikeNano.source = nano_errors(bench)
    shares = torch.tensor(LikeNano.source.codes.shape)
    bench.say(f"errors of nano: {shares.tolist()}, skip is {CODES.index(SKIP)}")
    for name in given.sizes:
        if bench.left < 30:
            bench.say(f"{name}: skipped, the time is up")
            continue
        try:
            subject = SUBJECTS[name](bench)
            measure(bench, subject, BUDGETS[name], all_kinds=name == "480p")
        except Exception as error:  # the other models do not depend on this one
            bench.add(part="failed", model=name, error=f"{type(error).__name__}: {error}"[:300])
        LikeNano.drawn.clear()
        gc.collect()
        torch.cuda.empty_cache()
    bench.write()


if __name__ == "__main__":
    main()
