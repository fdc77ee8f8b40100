"""What replaying and recording a book cost on a GPU, at the size of Wan-1.3B 720p.

    PYTHONPATH=src python benchmarks/dev/book_gpu.py [--seconds 50]

A book of 4 steps × 30 layers × 12 heads × 296 × 591 blocks is made of structured q and k, written,
opened and replayed. Measured are: what turning bits into lists adds to a layer, between two calls
of attention so that launches are hidden; whole calls with ready lists and with replay, in turn;
what the masks take of the GPU's memory; how long a change of step keeps the host; and how much
slower a dense transformer becomes while it is recorded (needs diffusers). Writes
$OUT/book-h200.json. Times are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.backends import Task, choose
from jali.evaluation.bench.inputs import SHAPES, make_inputs
from jali.evaluation.bench.machine import machine
from jali.evaluation.bench.measure import sampled_error
from jali.files import write_json
from jali.maskbook import Fingerprint, Header, MaskBook, write_book
from jali.maskbook.bits import plan_of
from jali.maskbook.cached import Cached
from jali.methods import FastestDense, Query
from jali.planning.budget import Budget
from jali.planning.plan import BlockPlan
from jali.planning.scoring import sample_positions, sampled_scores
from jali.planning.site import Site
from jali.tokens.layout import Blocks, block_layout
from jali.tokens.order import Raster

SHAPE = SHAPES["wan-720p"]
BLOCKS = Blocks(256, 128)
STEPS, LAYERS, BUDGET = 4, 30, 0.5
DEVICE = torch.device("cuda")
SCALE = SHAPE.head_dim**-0.5
START = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - START:5.1f} s  {text}", flush=True)


def make_book(folder: Path, q: Tensor, k: Tensor) -> MaskBook:
    """Importance of one layer, rolled along the keys for the others: no two plans are equal."""
    layout = block_layout(SHAPE.grid, None, None, BLOCKS, None, DEVICE)
    at = sample_positions(SHAPE.tokens, BLOCKS.q, 4, DEVICE)
    scores = sampled_scores(q, k, layout, SCALE, at)[0]
    header = Header(
        fingerprints={"transformer": Fingerprint("WanTransformer3DModel", "0" * 64)},
        grid=SHAPE.grid, order=Raster(), blocks=BLOCKS, layers=LAYERS, heads=SHAPE.heads,
        noise=tuple(1 - i / STEPS for i in range(STEPS)), noise_kind="sigma",
        transformers=("transformer",) * STEPS, branches=("mean",), budgets=(BUDGET,),
        prompts=("0" * 32,), model="wan-720p",
    )  # fmt: skip

    def slab(step: int, layer: int) -> Tensor:
        return scores.roll(7 * (step * LAYERS + layer), -1)[None]

    return write_book(folder / "book.safetensors", header, slab, DEVICE)


def median_us(marks: list[tuple[Any, Any]]) -> float:
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in marks)


def event() -> Any:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def replay_rows(book: MaskBook, q: Tensor, k: Tensor, v: Tensor, repeats: int) -> dict[str, Any]:
    task = Task(DEVICE, q.dtype, SHAPE.head_dim, SHAPE.heads, SHAPE.heads, SHAPE.tokens,
                SHAPE.tokens)  # fmt: skip
    backend = choose("auto", task)
    layout = book.layout(DEVICE)
    replay = book.replay(DEVICE)
    method = Cached(book, Budget(BUDGET))

    def expand(layer: int, step: int = 0) -> BlockPlan:
        return plan_of(replay.bits(BUDGET, step, layer, 0), layout)

    def attend(plan: BlockPlan) -> Tensor:
        return backend.attend(q, k, v, plan, SCALE)[0]

    def planned(layer: int) -> BlockPlan:
        """The whole of the method: its checks and its look-up too."""
        return method.plan(Query(q, k, layout, Site(0, STEPS, layer, LAYERS), SCALE))

    ready = [expand(layer) for layer in range(4)]
    for plan in ready:
        attend(plan)
    say(f"attention by {backend.name}, cost {ready[0].cost:.3f}")
    added, with_ready, with_replay = [], [], []
    for i in range(repeats):
        layer = i % 4
        a = event()
        attend(ready[layer])
        b = event()
        plan = planned(layer)
        c = event()
        out = attend(plan)
        d = event()
        with_ready.append((a, b))
        added.append((b, c))
        with_replay.append((b, d))
    error = sampled_error(q, k, v, out, plan, SCALE)
    rows: dict[str, Any] = {
        "backend": backend.name,
        "cost": plan.cost,
        "error_against_fp32": error,
        "added_us_per_layer": median_us(added),
        "ready_ms": median_us(with_ready) / 1e3,
        "replay_ms": median_us(with_replay) / 1e3,
    }
    # The kernel alone, many in a row: what it takes of the GPU, without launches in between.
    graph = torch.cuda.CUDAGraph()
    bits = replay.bits(BUDGET, 0, 0, 0)
    with torch.cuda.graph(graph):
        kept = [plan_of(bits, layout).lists for _ in range(10)]
    marks = []
    for _ in range(10):
        a = event()
        graph.replay()
        marks.append((a, event()))
    rows["kernel_us"] = median_us(marks) / 10
    del graph, kept
    same = all(
        torch.equal(expand(layer).levels, book.plan(BUDGET, 0, layer, device="cpu").levels.cuda())
        for layer in (0, 7, LAYERS - 1)
    )
    rows["lists_equal_the_bits"] = same
    return rows


def memory_rows(book: MaskBook) -> dict[str, Any]:
    book.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    replay, layout = book.replay(DEVICE), book.layout(DEVICE)
    for step in range(STEPS):
        for layer in range(LAYERS):
            plan = plan_of(replay.bits(BUDGET, step, layer, 0), layout)
    torch.cuda.synchronize()
    del plan
    return {
        "buffers_mb": replay.bytes / 1e6,
        "peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
    }


def turn_rows(book: MaskBook) -> dict[str, Any]:
    """How long the host waits when the step changes, with the next one ready and without."""
    book.close()
    replay = book.replay(DEVICE)

    def turn(step: int) -> float:
        begin = time.perf_counter()
        replay.bits(BUDGET, step, 0, 0)
        return 1e3 * (time.perf_counter() - begin)

    cold = turn(0)
    warm = []
    for step in (1, 2, 3):
        time.sleep(0.2)  # a step of the model takes longer
        warm.append(turn(step))
    return {"cold_ms": cold, "prefetched_ms": statistics.median(warm)}


def calibration_rows(folder: Path, layers: int, repeats: int) -> dict[str, Any]:
    """A few layers of Wan-1.3B, dense: stock, under jali, and recorded, in turn."""
    try:
        from diffusers import WanTransformer3DModel

        from jali.integration.modes import apply_sparse_attention
        from jali.maskbook.calibration.recorder import Recorder
        from jali.maskbook.calibration.running_mean import RunningMean
        from jali.maskbook.calibration.scorer import Sampled
    except ImportError as error:
        return {"skipped": str(error)}
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=12, attention_head_dim=128, in_channels=16,
            out_channels=16, text_dim=4096, freq_dim=256, ffn_dim=8960, num_layers=layers,
            cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        ).to(torch.bfloat16).eval()  # fmt: skip
        latents = torch.randn(1, 16, 21, 90, 160, dtype=torch.bfloat16)
        text = torch.randn(1, 512, 4096, dtype=torch.bfloat16)
    clock = iter(range(10**6))

    def forward() -> None:
        # A new timestep each: for the recorder every call is a step of its own.
        model(latents, torch.tensor([999.0 - next(clock)], device=DEVICE), text)

    count = repeats + 2
    shape = [count, layers, 1, 12, 296, 591]

    def start(_: Recorder) -> RunningMean:
        mean = RunningMean(folder, 0, {"shape": shape})
        mean.begin()
        return mean

    def timed(work: Callable[[], None]) -> list[float]:
        found = []
        for _ in range(count):
            a = event()
            work()
            b = event()
            torch.cuda.synchronize()
            found.append(a.elapsed_time(b))
        return found[2:]

    rows: dict[str, Any] = {"layers": layers, "tokens": SHAPE.tokens, "batch": 1}
    with torch.no_grad():
        rows["stock_ms"] = statistics.median(timed(forward))
        handle = apply_sparse_attention(model, FastestDense(), steps=count)
        try:
            rows["dense_ms"] = statistics.median(timed(forward))
            handle.run.clock.restart()
            clock = iter(range(10**6))
            recorder = Recorder(Sampled(), BLOCKS, Raster(), ("mean",), start)
            handle.run.watch = recorder
            rows["recorded_ms"] = statistics.median(timed(forward))
            recorder.finish()
            rows["recorded_places"] = count * layers - len(recorder.mean.missing())  # type: ignore[union-attr]
            recorder.close()
        finally:
            handle.remove()
    rows["slowdown_over_dense"] = rows["recorded_ms"] / rows["dense_ms"] - 1
    rows["slowdown_over_stock"] = rows["recorded_ms"] / rows["stock_ms"] - 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=50.0, help="no new part after this")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4, help="of the recorded transformer")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "what": "replay and calibration of a MaskBook",
        "machine": machine(DEVICE),
        "shape": {
            "name": SHAPE.name, "grid": str(SHAPE.grid), "tokens": SHAPE.tokens,
            "heads": SHAPE.heads, "head_dim": SHAPE.head_dim, "blocks": str(BLOCKS),
            "query_blocks": 296, "key_blocks": 591, "steps": STEPS, "layers": LAYERS,
            "budget": BUDGET, "dtype": "bfloat16", "inputs": "structured",
        },
        "repeats": args.repeats,
    }  # fmt: skip
    target = Path(os.environ.get("OUT", ".")) / "book-h200.json"
    say(torch.cuda.get_device_name())
    q, k, v = make_inputs("structured", SHAPE, DEVICE, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        book = make_book(Path(folder), q, k)
        opened = time.perf_counter()
        book = MaskBook.open(Path(folder) / "book.safetensors")
        result["book"] = {
            "bytes": book.bytes,
            "write_s": time.monotonic() - begin,
            "open_ms": 1e3 * (time.perf_counter() - opened),
        }
        say(f"book of {book.bytes / 1e6:.0f} MB written in {result['book']['write_s']:.1f} s")
        recording = Path(folder) / "mean"
        recording.mkdir()
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "replay": lambda: replay_rows(book, q, k, v, args.repeats),
            "memory": lambda: memory_rows(book),
            "step_change": lambda: turn_rows(book),
            "calibration": lambda: calibration_rows(recording, args.layers, 5),
        }
        for name, part in parts.items():
            if time.monotonic() - START > args.seconds:
                result[name] = {"skipped": f"after {args.seconds} s"}
                continue
            try:
                result[name] = part()
            except Exception as error:
                result[name] = {"failed": repr(error)[:500]}
            say(f"{name}: {result[name]}")
            write_json(target, result, sort_keys=False)
        book.close()
    result["device_seconds"] = round(time.monotonic() - START, 1)
    write_json(target, result, sort_keys=False)
    say(f"written {target}")


if __name__ == "__main__":
    main()
