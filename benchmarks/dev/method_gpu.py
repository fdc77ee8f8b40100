"""Planning and whole calls of every method at real sizes on a GPU, beside dense FlashAttention-4.

    PYTHONPATH=src python benchmarks/dev/method_gpu.py [--seconds 120]

12 heads of 128 at 480p (32,760 tokens) and 720p (75,600), bfloat16, budget 0.3. For rd a table with
4 and 8 samples, choosing levels from a kept one, what a block takes at each level, and the
attention of plans whose shares of levels are those of nano's own runs at that budget: numbers drawn
by lot have no such levels. Writes $OUT/methods-h200.json, anew after every row. Times are medians
of device time in milliseconds, the host being ahead.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali import BlockPlan, Budget, Entropy, Site, TokenGrid, load_pipeline, sparse_processor_mode
from jali.attend import PreparedCall, attend_densely, prepare
from jali.checks import check_call
from jali.correction import correct, probe
from jali.evaluation.bench.machine import machine
from jali.files import write_json
from jali.kernels.sampled_errors import sampled_errors
from jali.methods import METHODS, Method, RateDistortion, rd
from jali.methods.sampling import jittered_positions
from jali.planning import tradeoff
from jali.planning.distortion import error_table, samples_share
from jali.planning.plan import MEAN, SKIP
from jali.planning.tables import Tables

START = time.monotonic()
HEADS, DIM = 12, 128
SIZES = {"480p": (21, 30, 52), "720p": (21, 45, 80)}
BUDGETS = (0.3, 0.5)
ALL_LEVELS = RateDistortion(0.3, levels=(2, 4, 8, "mean", "skip"))
RESULT: dict[str, Any] = {"what": "planning and whole calls of methods", "rows": []}


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        torch.cuda._sleep(10_000_000)  # some milliseconds, so that the host is ahead
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def add(**row: Any) -> None:
    RESULT["rows"].append(row)
    print(f"{time.monotonic() - START:6.1f} s  {row}", flush=True)
    write_json(Path(os.environ.get("OUT", ".")) / "methods-h200.json", RESULT, sort_keys=False)


def tokens(length: int, seed: int) -> Tensor:
    """[1, H, S, D] view of BSHD memory: noise over slowly drifting directions, as in real heads."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    coarse = torch.randn(1, HEADS * DIM, length // 64 + 2, device="cuda", generator=g)
    smooth = torch.nn.functional.interpolate(coarse, length, mode="linear").transpose(1, 2)
    noise = torch.randn(1, length, HEADS * DIM, device="cuda", generator=g)
    return (smooth + noise).bfloat16().contiguous().unflatten(2, (HEADS, DIM)).transpose(1, 2)


@functools.cache
def level_shares(method: RateDistortion) -> dict[float, dict[int, float]]:
    """Shares of the levels in nano's own plans at the BUDGETS, over the layers and steps that have
    about that budget."""
    seen: dict[float, list[Tensor]] = {budget: [] for budget in BUDGETS}
    plain = tradeoff.choose_plan

    def watched(table: Any, layout: Any, ratios: Any, budget: Any, *rest: Any) -> BlockPlan:
        plan = plain(table, layout, ratios, budget, *rest)
        for near, found in seen.items():
            if abs(budget - near) < 0.06:
                found.append(plan.levels.flatten().long().bincount(minlength=256).float())
        return plan

    pipe = load_pipeline("nano", device="cuda", dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    rd.choose_plan = watched
    try:
        with sparse_processor_mode(pipe, method=method, total=0.45):
            pipe(
                ["a large red striped ball moves right over a grey hilly background"],
                height=192, width=320, num_frames=37, num_inference_steps=12, output_type="latent",
            )  # fmt: skip
    finally:
        rd.choose_plan = plain
    shares = {budget: torch.stack(found).sum(0) for budget, found in seen.items() if found}
    return {
        budget: {
            level: float(counts[level] / counts.sum()) for level in (*method.ratios, SKIP)
        }
        for budget, counts in shares.items()
    }  # fmt: skip


def drawn(prepared: PreparedCall, shares: dict[int, float]) -> BlockPlan:
    """A plan with these shares of levels, drawn by lot, the diagonal read."""
    layout = prepared.layout
    levels = torch.tensor(list(shares), dtype=torch.uint8, device="cuda")
    weights = torch.tensor(list(shares.values()), device="cuda")
    shape = HEADS, layout.M, layout.N
    picked = torch.multinomial(weights, HEADS * layout.M * layout.N, replacement=True)
    chosen = torch.where(layout.forced, 1, levels[picked].view(shape))[None]
    ratios = tuple(level for level in shares if level != SKIP)
    return BlockPlan(layout, ratios, map=chosen.contiguous())


def call_of(method: Method, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid) -> PreparedCall:
    call = check_call(q, k, v, method, grid, None, None, None, None, False)
    return prepare(call, method, "auto")


def methods() -> Iterator[tuple[str, Method]]:
    for name, kind in METHODS.items():
        if name != "dense":
            yield name, kind().with_budget(0.3)
    yield "entropy, 64 probes", Entropy(Budget(0.3), probes=64)
    yield "rd, no probes", RateDistortion(0.3, probes=0)
    yield "entropy, ESA's blocks", Entropy(Budget(0.3), q_block=256, k_block=128)


def rd_rows(size: str, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid, dense: float) -> None:
    method = ALL_LEVELS
    prepared = call_of(method, q, k, v, grid)
    layout, levels, scale = prepared.layout, method.codes, DIM**-0.5
    work = 4 * grid.tokens**2 * DIM * HEADS / 1e9  # GFLOP of dense attention
    for samples in (4, 8):
        at = jittered_positions(grid.tokens, 128, samples, 0, Site(), q.device)
        taken = milliseconds(lambda at=at: sampled_errors(q, k, v, 128, scale, at, levels))  # type: ignore[misc]
        add(size=size, rd="errors", samples=samples, ms=taken)
        taken = milliseconds(
            lambda at=at: error_table(q, k, v, layout, scale, at, levels)  # type: ignore[misc]
        )
        share = samples_share(layout, samples, levels)
        add(size=size, rd="table", samples=samples, ms=taken, share_of_dense_work=share,
            tflops=(share + samples / 128) * work / taken)  # fmt: skip
        taken = milliseconds(
            lambda at=at: error_table(q, k, v, layout, scale, at, (MEAN, SKIP))  # type: ignore[misc]
        )
        add(size=size, rd="table, mean, skip", samples=samples, ms=taken)
    table = error_table(q, k, v, layout, scale, at, levels)
    looking = milliseconds(lambda: tradeoff.with_left(table, layout))
    add(size=size, rd="work left at every price", ms=looking)
    kept = tradeoff.with_left(table, layout)
    for budget in BUDGETS:
        choosing = milliseconds(
            lambda b=budget: tradeoff.choose_plan(kept, layout, method.ratios, b)  # type: ignore[misc]
        )
        add(size=size, rd="choosing", budget=budget, ms=choosing)
    for name, kind in (
        ("all levels", method),
        ("mean, skip", RateDistortion()),
    ):
        prepared = call_of(kind, q, k, v, grid)
        query, values = prepared.query(q, k, v, Site())
        for budget, shares in level_shares(kind).items():
            plan = drawn(prepared, shares).coarsen(prepared.blocks)
            taken = milliseconds(
                lambda p=plan, c=prepared, y=query, z=values: c.backend.attend(  # type: ignore[misc]
                    y.q, y.k, z(), p, scale, None, None
                )
            )
            cost = float(plan.cost)
            add(size=size, rd=f"attention, {name}", budget=budget, backend=prepared.backend.name,
                shares={str(a): round(b, 4) for a, b in shares.items()}, cost=cost, ms=taken,
                speedup=dense / taken, rate_of_dense=cost * dense / taken,
                speedup_with_choosing=dense / (taken + choosing))  # fmt: skip


def level_rows(size: str, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid) -> None:
    """What a block takes at each level, of what it takes to read one in full: by how much a call
    takes longer where more blocks are read so."""
    prepared = call_of(ALL_LEVELS, q, k, v, grid)
    query, values = prepared.query(q, k, v, Site())

    def taken(level: int, share: float) -> tuple[float, float]:
        shares = {1: 0.2, level: share, SKIP: 0.8 - share}
        if level == 1:
            shares = {1: 0.2 + share, 8: 0.02, SKIP: 0.78 - share}
        plan = drawn(prepared, shares).coarsen(prepared.blocks)
        ms = milliseconds(
            lambda: prepared.backend.attend(query.q, query.k, values(), plan, DIM**-0.5, None, None)
        )
        return ms, float((plan.levels == level).float().mean())

    each = {}
    for level in (1, 2, 4, 8, MEAN):
        (a, few), (b, many) = taken(level, 0.1), taken(level, 0.5)
        each[level] = (b - a) / (many - few)
    for level, ms in each.items():
        add(size=size, rd="level", level=level, ms_of_all_blocks=ms, of_full=ms / each[1],
            backend=prepared.backend.name)  # fmt: skip


def probe_rows(size: str, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid) -> None:
    """What probes take: their own attention, and the fit with the correction of all rows."""
    prepared = call_of(Entropy(Budget(0.3)), q, k, v, grid)
    query, values = prepared.query(q, k, v, Site())
    _, executed = prepared.plan(query)
    v = values()
    out, _ = prepared.backend.attend(query.q, query.k, v, executed, query.scale, None, None)
    for count in (32, 64):
        probes = probe(query, v, executed, count)
        looking = milliseconds(functools.partial(probe, query, v, executed, count))
        correcting = milliseconds(functools.partial(correct, out, probes))
        add(size=size, probes=count, parts=probes.parts.shape[2], ms_attention=looking,
            ms_correction=correcting, ms=looking + correcting)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    limit = parser.parse_args().seconds
    RESULT["machine"] = machine(torch.device("cuda"))
    for size, shape in SIZES.items():
        grid = TokenGrid.video(*shape)
        q, k, v = (tokens(grid.tokens, seed) for seed in range(3))
        call = check_call(q, k, v, Entropy(), grid, None, None, None, None, False)
        found = attend_densely(q, k, v, call)
        dense = milliseconds(lambda c=call, x=(q, k, v): attend_densely(*x, c))  # type: ignore[misc]
        add(size=size, dense=found.backend, ms=dense)
        level_rows(size, q, k, v, grid)
        rd_rows(size, q, k, v, grid, dense)
        probe_rows(size, q, k, v, grid)
        for name, method in methods():
            if time.monotonic() - START > limit:
                break
            try:
                prepared = call_of(method, q, k, v, grid)
                query, _ = prepared.query(q, k, v, Site())
                planning = milliseconds(lambda p=prepared, y=query: p.plan(y), 3)  # type: ignore[misc]
                whole = milliseconds(
                    lambda p=prepared, x=(q, k, v): p.run(*x, Site(), Tables()),
                    3,  # type: ignore[misc]
                )
                cost = prepared.run(q, k, v, Site(), None).plan.cost  # type: ignore[union-attr]
                add(size=size, method=name, backend=prepared.backend.name, cost=cost,
                    planning_ms=planning, ms=whole, speedup=dense / whole)  # fmt: skip
            except Exception as error:  # the other methods do not depend on this one
                add(size=size, method=name, error=f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
