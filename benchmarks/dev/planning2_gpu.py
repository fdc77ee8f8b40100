"""Old against new paths of the planning kernels on a GPU: checks first, then times.

    PYTHONPATH=src python benchmarks/dev/planning2_gpu.py [--seconds 95]

Six helper processes compile every configuration in parallel before anything is timed. Prints one
line per measurement and writes $OUT/planning2_gpu.json. Times are medians in milliseconds:
`events` includes launch overheads, `graph` is the replay of a captured CUDA graph. A measurement
that takes longer than 20 s ends the run (what was measured until then is written).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from jali.kernels.score_tiles import Tile
from jali.kernels.scores import (
    antidiagonal_scores,
    block_mean_pair,
    block_means,
    mean_scores,
    sampled_peak_scores,
    sampled_scores,
)
from jali.kernels.selection import (
    cumulative_ends,
    entropy_budgets,
    level_lists,
    list_levels,
    select_lists,
)
from jali.planning.selection import cumulative_ends as plain_cumulative_ends
from jali.planning.selection import levels_by_rank, ranks

HEADS, DIM = 12, 128
SCALE = DIM**-0.5
RATIOS = (1, 2, 4, 8)
HELPERS = 6
START = time.monotonic()
RESULTS: dict[str, dict[str, object]] = {"checks": {}, "times": {}, "errors": {}}
Work = Callable[[], object]


def tokens(length: int, seed: int) -> Tensor:
    """[1, H, S, D] view of BSHD memory: noise over slowly drifting directions, as in real heads."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    coarse = torch.randn(1, HEADS * DIM, length // 64 + 2, device="cuda", generator=g)
    smooth = torch.nn.functional.interpolate(coarse, length, mode="linear").transpose(1, 2)
    noise = torch.randn(1, length, HEADS * DIM, device="cuda", generator=g)
    x = (1.3 * smooth + noise).to(torch.bfloat16).contiguous()
    return x.view(1, length, HEADS, DIM).transpose(1, 2)


def spread(length: int, block: int, per_block: int) -> Tensor:
    starts = torch.arange(0, length, block, device="cuda")
    real = torch.clamp(length - starts, max=block)
    offset = (torch.arange(per_block, device="cuda") + 0.5)[None] * real[:, None] / per_block
    return starts[:, None] + offset.long()


def peak_positions(length: int, block: int) -> Tensor:
    g = torch.Generator().manual_seed(block)
    offsets = torch.randperm(block, generator=g)[: block // 4].sort().values.cuda()
    at = torch.arange(0, length, block, device="cuda")[:, None] + offsets[None]
    return torch.where(at < length, at, -1).to(torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


# ---------------------------------------------------------------- what is timed


def means_works(q: Tensor, k: Tensor, label: str, sweep: bool) -> dict[str, Work]:
    n = -(-q.shape[2] // 128)
    keep = torch.full((1, HEADS), max(1, n // 5), dtype=torch.int32, device="cuda")
    forced = torch.zeros(n, n, dtype=torch.bool, device="cuda")
    forced[:, -14:] = True
    full = forced[:, -1] & False
    full[-14:] = True

    def old() -> object:
        scores = mean_scores(block_means(q, 128), block_means(k, 128), SCALE)
        return select_lists(scores, keep, forced, full, registers=255)

    def new() -> object:
        scores = mean_scores(*block_mean_pair(q, k, 128, 128), SCALE)
        return select_lists(scores, keep, forced, full)

    works: dict[str, Work] = {
        f"CHAIN rf_v2 {label} separate": old,
        f"CHAIN rf_v2 {label} new": new,
    }
    a, b = block_mean_pair(q, k, 128, 128)
    scores = mean_scores(a, b, SCALE)
    works[f"  mean pair {label} 32 warps 4"] = lambda: block_mean_pair(q, k, 128, 128)
    works[f"  select_lists {label}"] = lambda: select_lists(scores, keep, forced, full)
    works[f"  mean_scores {label} 64x64"] = lambda: mean_scores(a, b, SCALE)
    if sweep:
        for t, w in ((16, 4), (64, 4), (128, 4), (32, 2), (16, 2), (32, 8)):
            works[f"    mean pair {label} {t} warps {w}"] = lambda t=t, w=w: block_mean_pair(
                q, k, 128, 128, tokens=t, warps=w
            )
        for warps, registers in ((1, 255), (1, 80), (2, 255), (4, 255)):
            name = f"    select_lists {label} w{warps} r{registers}"
            works[name] = lambda w=warps, r=registers: select_lists(
                scores, keep, forced, full, warps=w, registers=r
            )
        for r, c, w in ((64, 128, 4), (128, 128, 8), (128, 64, 4)):
            works[f"    mean_scores {label} {r}x{c} w{w}"] = lambda r=r, c=c, w=w: mean_scores(
                a, b, SCALE, rows=r, keys=c, warps=w
            )
    return works


def anti_works(q: Tensor, k: Tensor, label: str, sweep: bool) -> dict[str, Work]:
    n = -(-q.shape[2] // 128)
    keep = torch.full((1, HEADS), max(1, n // 5), dtype=torch.int32, device="cuda")

    def score(**options: object) -> Tensor:
        return antidiagonal_scores(q, k, 128, 128, SCALE, **options)

    works: dict[str, Work] = {
        f"CHAIN ada_bsa {label} pointers 128x256": lambda: select_lists(
            score(tile=Tile(128, 256, 8, 3, 64), tma=False), keep, registers=255
        ),
        f"CHAIN ada_bsa {label} new": lambda: select_lists(score(), keep),
    }
    configs: list[tuple[tuple[int, ...], int, int]] = [
        ((128, 256, 8, 3, 64), 16, 0),
        ((128, 128, 4, 3, 64), 16, 0),
        ((256, 128, 8, 4, 64), 16, 0),
        ((128, 256, 8, 4, 64), 16, 1),
    ]
    if sweep:
        configs += [
            ((128, 256, 8, 4, 64), 8, 0),
            ((128, 256, 8, 4, 64), 32, 0),
            ((256, 128, 8, 3, 64), 16, 0),
            ((64, 256, 4, 2, 64), 16, 0),
            ((256, 128, 8, 4, 64), 16, 1),
            ((128, 128, 4, 3, 64), 16, 2),
            ((128, 256, 8, 3, 64), 16, 1),
        ]
    for config, band, persistent in configs:
        name = f"    antidiagonal {label} tma {config} band {band}"
        works[name + (f" persistent {persistent}" if persistent else "")] = (
            lambda c=config, b=band, p=persistent: score(
                tile=Tile(*c), band=b, persistent=p, tma=True
            )
        )
    works[f"    antidiagonal {label} pointers default"] = lambda: score(tma=False)
    return works


def entropy_works(q: Tensor, k: Tensor, label: str, sweep: bool) -> dict[str, Work]:
    positions = spread(q.shape[2], 256, 4)
    m, n = positions.shape[0], -(-q.shape[2] // 128)
    rows = torch.ones(m, dtype=torch.bool, device="cuda")
    forced = torch.zeros(m, n, dtype=torch.bool, device="cuda")
    forced[:, 0] = True

    def score(**options: object) -> Tensor:
        return sampled_scores(q, k, 256, 128, SCALE, positions, **options)

    def old() -> object:
        scores = score(tile=Tile(128, 128, 8, 2), tma=False)
        keep = entropy_budgets(scores, 0.3, 0.05, 1.0, 1.0, rows)
        return select_lists(scores, keep, forced, registers=255)

    def new() -> object:
        scores = score()
        keep = entropy_budgets(scores, 0.3, 0.05, 1.0, 1.0, rows)
        return select_lists(scores, keep, forced)

    works: dict[str, Work] = {
        f"CHAIN entropy {label} pointers 128x128": old,
        f"CHAIN entropy {label} new": new,
        f"  sampled_scores {label} new": score,
        f"  sampled_scores {label} pointers 64x128": lambda: score(
            tile=Tile(64, 128, 4, 3), tma=False
        ),
    }
    configs: list[tuple[int | None, ...]] = [(64, 128, 4, 3), (128, 64, 8, 4, 64, 128)]
    if sweep:
        configs += [
            (128, 128, 4, 2),
            (128, 64, 8, 3, 64, 128),
            (128, 64, 4, 3),
            (64, 64, 4, 3, 64, 168),
            (64, 128, 4, 2),
            (128, 128, 8, 3),
            (256, 64, 8, 2),
        ]
    for config in configs:
        works[f"    sampled {label} tma {config}"] = lambda c=config: score(tile=Tile(*c), tma=True)
    return works


def psa_works(q: Tensor, k: Tensor) -> dict[str, Work]:
    qp, kp = peak_positions(q.shape[2], 128), peak_positions(k.shape[2], 64)
    n = kp.shape[0]
    ends = ints(*(int(n * u) for u in (0.10, 0.25, 0.40, 0.75)))
    bounds = torch.tensor([0.4, 0.5, 0.6, 0.8], device="cuda")

    def score(normalised: bool = False, **options: object) -> Tensor:
        return sampled_peak_scores(q, k, 128, 64, SCALE, qp, kp, normalised=normalised, **options)

    works: dict[str, Work] = {}
    old_tile = Tile(128, 128, 4, 2)
    for normalised in (False, True):
        label = "softmax" if normalised else "surrogate"

        def old(flag: bool = normalised) -> object:
            scores = score(flag, tile=old_tile, tma=False)
            return list_levels(scores, ends, RATIOS, RATIOS)

        def new(flag: bool = normalised) -> object:
            return list_levels(score(flag), ends, RATIOS, RATIOS)

        works[f"CHAIN psa {label} with lists, old"] = old
        works[f"CHAIN psa {label} with lists, new"] = new
        works[f"  peak scores {label} new"] = lambda f=normalised: score(f)
        works[f"  peak scores {label} pointers"] = lambda f=normalised: score(f, tma=False)
        for config in (
            (128, 128, 4, 2),
            (128, 64, 8, 4, 64, 128),
            (128, 64, 4, 3),
            (64, 128, 4, 3),
            (64, 64, 4, 3, 64, 168),
        ):
            works[f"    peak {label} tma {config}"] = lambda c=config, f=normalised: score(
                f, tile=Tile(*c), tma=True
            )
    scores = score()
    levels = torch.randint(0, 4, scores.shape, device="cuda", dtype=torch.uint8)
    works["  list_levels"] = lambda: list_levels(scores, ends, RATIOS, RATIOS)
    works["  cumulative_ends"] = lambda: cumulative_ends(scores, bounds)
    works["  list_levels warps 2"] = lambda: list_levels(scores, ends, RATIOS, RATIOS, warps=2)
    works["  level_lists, 4 ratios"] = lambda: level_lists(levels, RATIOS)
    works["  level_lists, 4 ratios, warps 2"] = lambda: level_lists(levels, RATIOS, warps=2)
    works["  level_lists, one ratio"] = lambda: level_lists(levels, (2,))
    return works


def all_works(data: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Work]:
    """Everything that is timed, the most important first, what could hang last."""
    big, small, psa = data["720p"], data["480p"], data["psa"]
    works: dict[str, Work] = {}
    works |= means_works(*big, "720p", True)
    works |= entropy_works(*big, "720p", True)
    works |= anti_works(*big, "720p", True)
    works |= psa_works(*psa)
    works |= entropy_works(*small, "480p", False)
    works |= anti_works(*small, "480p", False)
    works |= means_works(*small, "480p", False)
    return dict(sorted(works.items(), key=lambda item: "persistent" in item[0]))


# ---------------------------------------------------------------- checks


def agree(name: str, got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    """Equal up to a share of each row's peak."""
    error = ((got - want).abs().amax(-1) / want.abs().amax(-1).clamp_min(1e-30)).max().item()
    put(name, error < tolerance, f"error {error:.2e} of the peak")


def put(name: str, ok: bool, note: str = "") -> None:
    RESULTS["checks"][name] = {"ok": bool(ok), "note": note}
    print(f"check {name:60s} {'ok' if ok else 'FAILED'} {note}", flush=True)


def block_sum(p: Tensor, block: int) -> Tensor:
    n = -(-p.shape[-1] // block)
    return torch.nn.functional.pad(p, (0, n * block - p.shape[-1])).unflatten(-1, (n, -1)).sum(-1)


def check_scores(q: Tensor, k: Tensor, label: str) -> None:
    length = q.shape[2]
    positions = spread(length, 256, 4)
    new = sampled_scores(q, k, 256, 128, SCALE, positions, tma=True)
    agree(f"sampled {label} new = old", new, sampled_scores(
        q, k, 256, 128, SCALE, positions, tile=Tile(128, 128, 8, 2), tma=False
    ))  # fmt: skip
    rows = torch.linspace(0, positions.shape[0] - 1, 6).long().cuda()
    p = (q[0, 7, positions[rows].flatten()].float() @ k[0, 7].float().T * SCALE).softmax(-1)
    want = block_sum(p, 128).unflatten(0, (-1, 4)).mean(1)
    agree(f"sampled {label} = torch", new[0, 7, rows], want)
    short = ints(length // 2 + 3)
    agree(f"sampled {label} key_length", *(
        sampled_scores(q, k, 256, 128, SCALE, positions, short, tma=t) for t in (True, False)
    ))  # fmt: skip

    new = antidiagonal_scores(q, k, 128, 128, SCALE, tma=True)
    agree(f"antidiagonal {label} new = old", new, antidiagonal_scores(
        q, k, 128, 128, SCALE, tile=Tile(128, 256, 8, 3, 64), tma=False
    ))  # fmt: skip
    groups = -(-length // 8)
    index = torch.arange(groups * 8, device="cuda").clamp(max=length - 1).view(-1, 8).flip(1)
    keys = torch.nn.functional.pad(k[0, 7].float(), (0, 0, 0, groups * 8 - length))
    keys = keys.view(groups, 8 * DIM)
    real = torch.full((groups,), 8.0, device="cuda")
    real[-1] = length - 8 * (groups - 1)
    for block in (0, 11, -(-length // 128) - 1):
        logits = q[0, 7][index[block * 16 : block * 16 + 16]].float().flatten(1) @ keys.T
        want = block_sum((logits * SCALE / real + (real / 8).log()).softmax(-1), 16).mean(0)
        agree(f"antidiagonal {label} block {block} = torch", new[0, 7, block][None], want[None])

    pair = block_mean_pair(q, k, 128, 128)
    for name, x, got in zip("qk", (q, k), pair, strict=True):
        count = torch.full((got.shape[2],), 128.0, device="cuda")
        count[-1] = length - 128 * (got.shape[2] - 1)
        want = (block_sum(x[0, :2].float().transpose(1, 2), 128) / count).transpose(1, 2)
        agree(f"means of {name} {label} = torch", got[0, :2], want, 1e-5)
    scores = mean_scores(*pair, SCALE)
    check_lists(scores, label)


def check_lists(scores: Tensor, label: str) -> None:
    m, n = scores.shape[2:]
    g = torch.Generator(device="cuda").manual_seed(0)
    forced = torch.rand(m, n, device="cuda", generator=g) < 0.01
    full = torch.rand(m, device="cuda", generator=g) < 0.02
    keep = torch.randint(1, n, (1, HEADS), device="cuda", generator=g, dtype=torch.int32)
    tied = (scores * 8).round() / 8
    for kind, x in (("distinct", scores), ("tied", tied)):
        for must, rows in ((None, None), (forced, full)):
            rank = ranks(x, must)
            kept = rank < keep[..., None, None]
            if must is not None and rows is not None:
                kept = kept | must | rows[:, None]
            (want,) = level_lists(kept.to(torch.uint8), (1,)).values()
            word = "forced" if must is not None else "free"
            got = select_lists(x, keep, must, rows)
            put(f"lists {label} {kind} {word}", all(map(torch.equal, got, want)))
        ends = ints(n // 10, n // 4, n // 2, n - 3)
        got = list_levels(x, ends, RATIOS, RATIOS, forced, full)
        levels = levels_by_rank(ranks(x, forced), ends, RATIOS)
        want = level_lists(torch.where(forced | full[:, None], 1, levels).to(torch.uint8), RATIOS)
        put(f"levels {label} {kind}", torch.equal(got.indices, want.indices))
        good = torch.equal(got.counts, want.counts)
        levels = torch.randint(0, 4, x.shape, device="cuda", dtype=torch.uint8)
        column = torch.arange(n, device="cuda", dtype=torch.int32)
        for ratio, (counts, indices) in level_lists(levels, RATIOS).items():
            listed = torch.where(levels == ratio, column, n).sort(-1).values
            good &= torch.equal(indices, torch.where(listed < n, listed, 0))
            good &= torch.equal(counts.long(), (levels == ratio).sum(-1))
        put(f"level lists {label} {kind}", good)
        mass = x.softmax(-1)
        shares = (0.4, 0.5, 0.6, 0.8)
        a = cumulative_ends(mass, torch.tensor(shares, device="cuda"))
        b = plain_cumulative_ends(mass, ranks(mass), shares, least=0)
        share = (a == b).float().mean().item()
        close = (a - b).abs().max().item() <= 1
        put(f"ends {label} {kind}", share > 0.999 and close, f"equal {share:.6f}")


def check_peaks(q: Tensor, k: Tensor) -> None:
    qp, kp = peak_positions(q.shape[2], 128), peak_positions(k.shape[2], 64)
    for normalised in (False, True):
        a, b = (
            sampled_peak_scores(q, k, 128, 64, SCALE, qp, kp, normalised=normalised, tma=t)
            for t in (True, False)
        )
        agree(f"peaks normalised={normalised} new = old", a, b)
        logits = q[0, 7, qp[9].long()].float() @ k[0, 7, kp.flatten().long()].float().T * SCALE
        top = logits.logsumexp(1) if normalised else logits.amax(1)
        want = (logits.unflatten(1, (-1, 16)).amax(2) - top[:, None]).exp().amax(0)
        want = want / want.sum()
        agree(f"peaks normalised={normalised} = torch", a[0, 7, 9][None], want[None])


# ---------------------------------------------------------------- timing


def event_ms(work: Work, repeats: int = 11) -> float:
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        work()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def graph_ms(work: Work) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    result = event_ms(graph.replay)
    del graph, kept
    return result


def write() -> None:
    target = Path(os.environ.get("OUT", ".")) / "planning2_gpu.json"
    target.write_text(json.dumps({"device": torch.cuda.get_device_name(), **RESULTS}, indent=1))


def guarded(name: str, work: Work) -> None:
    """Run it; note an error; end the process if it takes 20 s."""

    def give_up() -> None:
        print(f"{name} hangs: giving up", flush=True)
        RESULTS["errors"][name] = "took longer than 20 s"
        write()
        os._exit(3)

    timer = threading.Timer(20.0, give_up)
    timer.daemon = True
    timer.start()
    try:
        work()
        torch.cuda.synchronize()
    except Exception as error:
        RESULTS["errors"][name] = repr(error)[:600]
        print(f"{name:66s} FAILED {type(error).__name__}: {str(error)[:240]}", flush=True)
    finally:
        timer.cancel()


def measure(name: str, work: Work) -> None:
    row = {"events": event_ms(work), "graph": graph_ms(work)}
    RESULTS["times"][name] = row
    print(f"{name:66s} events {row['events']:7.4f}  graph {row['graph']:7.4f}", flush=True)


def compile_in_parallel(seconds: float) -> None:
    """Fill the compiler's cache: each helper runs its share of the works once."""
    command = [sys.executable, __file__, "--warm"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    helpers = [subprocess.Popen([*command, str(i)], **quiet) for i in range(HELPERS)]
    deadline = time.monotonic() + seconds
    for helper in helpers:
        try:
            helper.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            helper.kill()
    print(f"compiled after {time.monotonic() - START:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=95.0, help="no new measurement after this")
    parser.add_argument("--warm", type=int, help="only compile this helper's share")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.warm is None:
        compile_in_parallel(40.0)
    data = {
        name: (tokens(length, 1), tokens(length, 2))
        for name, length in (("480p", 32_760), ("720p", 75_600), ("psa", 32_768))
    }
    works = all_works(data)
    if args.warm is not None:
        for name in list(works)[args.warm :: HELPERS]:
            guarded(name, works[name])
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    odd = (tokens(9_003, 5), tokens(9_003, 6))
    for label in ("480p", "720p"):
        guarded(f"check {label}", lambda x=label: check_scores(*data[x], x))
    guarded("check odd", lambda: check_scores(*odd, "9003"))
    guarded("check peaks", lambda: check_peaks(*data["psa"]))
    print(f"checks done after {time.monotonic() - START:.0f} s", flush=True)
    skipped = []
    for name, work in works.items():
        if time.monotonic() - START > args.seconds:
            skipped.append(name)
            continue
        guarded(name, lambda n=name, w=work: measure(n, w))
    RESULTS["skipped"] = dict.fromkeys(skipped, True)
    write()
    failed = [n for n, c in RESULTS["checks"].items() if not c["ok"]]
    print(f"done after {time.monotonic() - START:.0f} s; skipped {skipped or 'nothing'}")
    print("failed checks:", failed or "none", "| errors:", list(RESULTS["errors"]) or "none")


if __name__ == "__main__":
    main()
