"""CUDA graphs of one attention call and of a whole transformer call, on the GPU at hand.

    PYTHONPATH=src OUT=/tmp/out python benchmarks/dev/graph_gpu.py --seconds 240
    PYTHONPATH=src python benchmarks/dev/graph_gpu.py --toy       # any machine, nothing is captured

A call is captured where nothing of it changes but its numbers: one step of a run at one budget. rd
has two such calls, one that makes its table (`refresh`) and one that reads a kept one (`kept`);
both graphs use the memory of the one table. Each graph is replayed on the numbers it was captured
with and on others, and compared with the plain call: `equal` says that both results are, bit for
bit. `waits` is what PyTorch says where the host waits for the device, which no graph can hold.

`ms` is the device's time of calls one after the other, `host_us` what the host needs to issue one;
plain calls and replays take turns. Models are those of `wan_gpu.py`: random weights, all layers but
the first sparse. $OUT/graphs-h200.json is written anew after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from wan_gpu import DENSE, P480, Bench, Subject, applied, sparse, wan, wan_model

from jali import attend
from jali.integration.stats import CallLog
from jali.integration.stopwatch import Stopwatch
from jali.methods import Entropy, Method, RateDistortion
from jali.planning.budget import Budget
from jali.planning.site import Site
from jali.planning.tables import Tables

STEPS = 50
BEFORE, REFRESH, KEPT = 5, 13, 14  # rd keeps a table for a quarter of the steps
SIZES = (P480, ("wan-240p", 21, 15, 26), ("5x16x16", 5, 16, 16))
BUDGET = 0.3
METHODS: dict[str, Method] = {
    "entropy": Entropy(Budget(BUDGET)),
    "rd": RateDistortion(BUDGET),
    "rd, no probes": RateDistortion(BUDGET, probes=0),
}
Step = Callable[[int], Tensor]  # the result of a call at a step


@dataclass
class Replay:
    """A captured call; on a CPU it is made anew."""

    graph: Any
    out: Tensor
    call: Callable[[], Tensor]
    pool: int = 0

    def __call__(self) -> Tensor:
        if self.graph is None:
            return self.call()
        self.graph.replay()
        return self.out


def captured(bench: Bench, call: Callable[[], Tensor], ready: Callable[[], object]) -> Replay:
    """`ready` brings the run to where the call is to be captured, after it was made there before:
    whatever is found once and remembered must not be found inside a graph."""
    if bench.toy:
        ready()
        return Replay(None, call(), call)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
            ready()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return Replay(graph, out, call, torch.cuda.memory_reserved() - before)


def waiting(bench: Bench, call: Callable[[], object]) -> str | None:
    """Where the host waits for the device in a call, in PyTorch's words."""
    if bench.toy:
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{Path(where.filename).name}:{where.lineno}: {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def timed(bench: Bench, call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Milliseconds of a call on the device, and microseconds in which the host issues it."""
    if bench.toy:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        took = (time.perf_counter() - begin) / calls
        return 1e3 * took, 1e6 * took
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    host = (time.perf_counter() - begin) / calls
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls, 1e6 * host


def in_turns(bench: Bench, works: dict[str, Callable[[], object]], calls: int) -> dict[str, Any]:
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(2 if bench.toy else 7):
        for name, work in works.items():
            rounds[name].append(timed(bench, work, calls))
    found: dict[str, Any] = {}
    for name, times in rounds.items():
        found[f"{name}_ms"] = statistics.median(ms for ms, _ in times)
        found[f"{name}_host_us"] = statistics.median(us for _, us in times)
    return found


def apart(found: Tensor, expected: Tensor) -> float:
    wrong, whole = (found - expected).double().norm(), expected.double().norm()
    return float(wrong / whole.clamp_min(1e-30))


@dataclass
class Work:
    """A call at a step, and what puts other numbers into its inputs."""

    step: Step
    renew: Callable[[int], None]
    keeps: bool  # whether there is a table to refresh


def measure(bench: Bench, work: Work, calls: int, **row: Any) -> None:
    """The rows of a work: one, or that of a refresh and that of a kept table."""
    kinds = {"refresh": REFRESH, "kept": KEPT} if work.keeps else {"call": KEPT}
    for kind, step in kinds.items():
        if bench.left < 10:
            bench.add(**row, kind=kind, skipped="the time is up")
            continue
        try:
            bench.add(**row, kind=kind, **one(bench, work, kind, step, calls))
        except Exception as error:
            traceback.print_exc(limit=8)
            text = str(error).strip().splitlines()
            bench.add(**row, kind=kind, failed=f"{type(error).__name__}: {' / '.join(text)[:400]}")
            if not bench.toy:
                torch.cuda.synchronize()


def one(bench: Bench, work: Work, kind: str, step: int, calls: int) -> dict[str, Any]:
    def ready() -> None:
        if kind == "refresh":
            work.step(BEFORE)  # leaves a table of another part of the run
        elif work.keeps:
            work.step(REFRESH)

    def call() -> Tensor:
        return work.step(step)

    work.renew(0)
    ready()
    call()
    ready()
    waits = waiting(bench, call)
    replay = captured(bench, call, ready)
    equal, worst = True, 0.0
    for seed in (0, 1):
        work.renew(seed)
        ready()
        expected = call().clone()
        ready()
        found = replay().clone()
        equal = equal and bool(torch.equal(found, expected))
        worst = max(worst, apart(found, expected))
    both: dict[str, Callable[[], object]] = {"plain": call, "graph": replay}
    if kind == "refresh":  # two of them: the second at one step would find the first one's table
        both["plain"] = lambda: (work.step(BEFORE), work.step(REFRESH))
    found_times = in_turns(bench, both, calls)
    if kind == "refresh":
        for name in ("plain_ms", "plain_host_us"):
            found_times[name] /= 2
    gain = found_times["plain_ms"] / found_times["graph_ms"]
    return {
        **found_times, "gain": gain, "equal": equal, "error": worst, "waits": waits,
        "pool_mb": round(replay.pool / 2**20, 1),
    }  # fmt: skip


# One attention call


def attention(bench: Bench, size: tuple[str, int, int, int], method: Method) -> Work:
    _, frames, high, wide = size
    heads, dim = (12, 128) if not bench.toy else (2, 32)
    if bench.toy:
        frames, high, wide = 3, 8, 8
    shape = (1, frames * high * wide, heads, dim)  # as models hand them over
    q, k, v = (torch.empty(shape, device=bench.device, dtype=bench.dtype) for _ in range(3))
    tables = Tables()

    def renew(seed: int) -> None:
        dice = torch.Generator(bench.device).manual_seed(seed)
        for x in (q, k, v):
            x.normal_(generator=dice)

    def step(number: int) -> Tensor:
        site = Site(number, STEPS, 1, 30)
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        return attend(
            q_, k_, v_, method=method, grid=(frames, high, wide), site=site, tables=tables
        ).out

    return Work(step, renew, method.keeps_tables)


def part_attention(bench: Bench) -> None:
    for size in SIZES:
        for name, method in METHODS.items():
            work = attention(bench, size, method)
            measure(bench, work, 20, part="attention", size=size[0], method=name)


# A whole transformer call


@contextlib.contextmanager
def transformer(subject: Subject, method: Method) -> Iterator[Work]:
    model, given = subject.model, subject.inputs(900.0)
    latents = given["hidden_states"]

    def renew(seed: int) -> None:
        latents.normal_(generator=torch.Generator(latents.device).manual_seed(seed))

    with applied(subject, method) as handle:

        def step(number: int) -> Tensor:
            # What a pipeline of diffusers 0.41 or newer announces; else its timestep is read.
            said = {"step_index": number, "num_inference_steps": STEPS}
            # An earlier step begins no new run: the table's memory stays where it is. Nor are times
            # and sums kept that a graph has not measured.
            handle.run.transformers[0].call = None
            handle.run.records, handle.run._times = CallLog(), Stopwatch()
            with torch.no_grad(), model.cache_context("cond", **said):
                out: Tensor = model(**given, return_dict=False)[0]
            return out

        yield Work(step, renew, method.base.keeps_tables)


def part_transformer(bench: Bench) -> None:
    model = wan_model(bench)
    whole = {"dense": DENSE} | {name: sparse(method) for name, method in METHODS.items()}
    for size in SIZES[:2]:
        subject = wan(bench, model, *size)
        for mode in ("compiled", "eager"):
            stance = "force_eager" if mode == "eager" else "default"
            for name, method in whole.items():
                with torch.compiler.set_stance(stance), transformer(subject, method) as work:
                    measure(
                        bench, work, 3, part="transformer", size=size[0], tokens=subject.tokens,
                        mode=mode, method=name,
                    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny, on the CPU, nothing is captured")
    parser.add_argument("--seconds", type=float, default=240.0, help="start nothing after this")
    given = parser.parse_args()
    if not given.toy and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --toy runs on the CPU")
    path = Path(os.environ.get("OUT", ".")) / "graphs-h200.json"
    bench = Bench(given.toy, given.seconds, 3, False, path)
    torch._dynamo.config.recompile_limit = 64
    for part in (part_attention, part_transformer):
        try:
            part(bench)
        except Exception as error:
            traceback.print_exc()
            bench.add(part=part.__name__, failed=f"{type(error).__name__}: {error}"[:400])
    bench.write()


if __name__ == "__main__":
    main()
