"""Check and time the planning kernels on a GPU: scores, budgets, lists, levels, gathers.

    PYTHONPATH=src python benchmarks/dev/planning_gpu.py [--seconds 170] [--skip-sweeps]

Prints one line per measurement and writes $OUT/planning_gpu.json. Times are medians in
milliseconds: `events` includes launch overheads, `graph` is the replay of a captured CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from jali.kernels.gather import gather_rows
from jali.kernels.score_tiles import Tile
from jali.kernels.scores import (
    antidiagonal_scores,
    block_means,
    mean_scores,
    sampled_peak_scores,
    sampled_scores,
)
from jali.kernels.selection import (
    cumulative_ends,
    entropy_budgets,
    levels_to_lists,
    row_entropy,
    select_levels,
    select_lists,
)

HEADS, DIM = 12, 128
SCALE = DIM**-0.5
SIZES = {"480p": 32_760, "720p": 75_600}
PSA_TOKENS = 32_768
START = time.monotonic()
RESULTS: dict[str, dict[str, object]] = {"checks": {}, "times": {}, "errors": {}}


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


def event_ms(work: Callable[[], object], repeats: int = 15) -> float:
    for _ in range(3):
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


def graph_ms(work: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    result = event_ms(graph.replay)
    del graph, kept
    return result


def extra_mb(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = work()
    torch.cuda.synchronize()
    del kept
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def measure(name: str, work: Callable[[], object], floor_ms: float | None = None) -> None:
    try:
        row = {"events": event_ms(work), "graph": graph_ms(work), "extra_mb": extra_mb(work)}
    except Exception as error:
        report_error(name, error)
        return
    RESULTS["times"][name] = row
    floor = f"  floor {floor_ms:.3f}" if floor_ms else ""
    print(
        f"{name:58s} events {row['events']:8.4f}  graph {row['graph']:8.4f}"
        f"  extra {row['extra_mb']:7.1f} MB{floor}",
        flush=True,
    )


def report_error(name: str, error: Exception) -> None:
    torch.cuda.synchronize()
    RESULTS["errors"][name] = repr(error)[:600]
    print(f"{name:58s} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    if not isinstance(error, triton.runtime.errors.OutOfResources):
        traceback.print_exc(limit=3)


def compare(name: str, got: Tensor, want: Tensor, distribution: bool = True) -> None:
    """got, want [rows, N]: same blocks kept at a quarter, same mass captured."""
    got, want = got.float(), want.float()
    keep = max(1, want.shape[-1] // 4)
    chosen = got.topk(keep, -1).indices
    best = want.topk(keep, -1).indices
    mask = torch.zeros_like(want, dtype=torch.bool)
    agree = mask.scatter(1, best, True).gather(1, chosen).float().mean().item()
    row = {
        "agreement": agree,
        "max_abs": (got - want).abs().max().item(),
        "max_rel_to_peak": ((got - want).abs().amax(-1) / want.abs().amax(-1)).max().item(),
    }
    if distribution:
        row["mass_lost"] = (want.gather(1, best) - want.gather(1, chosen)).sum(-1).max().item()
        row["row_sum_error"] = (got.sum(-1) - 1).abs().max().item()
    row["ok"] = agree >= 0.999 and row.get("mass_lost", 0.0) < 1e-3
    RESULTS["checks"][name] = row
    print(f"check {name:48s} " + "  ".join(f"{k} {v:.3g}" for k, v in row.items()), flush=True)


def guarded(name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        report_error(name, error)


def block_sum(p: Tensor, block: int) -> Tensor:
    n = -(-p.shape[-1] // block)
    p = torch.nn.functional.pad(p, (0, n * block - p.shape[-1]))
    return p.unflatten(-1, (n, block)).sum(-1)


HEAD_SAMPLE = (0, 7)


def check_sampled(q: Tensor, k: Tensor, qb: int, kb: int, label: str) -> None:
    length = q.shape[2]
    positions = spread(length, qb, 4)
    rows = torch.linspace(0, positions.shape[0] - 1, 12).long().cuda()
    for tail in (None, torch.tensor([length // 2 + 3], dtype=torch.int32, device="cuda")):
        scores = sampled_scores(q, k, qb, kb, SCALE, positions, tail)
        limit = length if tail is None else length // 2 + 3
        got, want = [], []
        for h in HEAD_SAMPLE:
            sample = q[0, h, positions[rows].flatten()].float()
            p = (sample @ k[0, h].float().T * SCALE)[:, :limit].softmax(-1)
            p = torch.nn.functional.pad(p, (0, length - limit))
            want.append(block_sum(p, kb).unflatten(0, (-1, 4)).mean(1))
            got.append(scores[0, h, rows])
        suffix = "" if tail is None else " key_length"
        compare(f"sampled {label} {qb}/{kb}{suffix}", torch.cat(got), torch.cat(want))


def check_means(q: Tensor, k: Tensor, label: str) -> None:
    length = q.shape[2]
    got = mean_scores(block_means(q, 128), block_means(k, 128), SCALE)[0, list(HEAD_SAMPLE)]
    count = torch.full((got.shape[-1],), 128.0, device="cuda")
    count[-1] = length - 128 * (got.shape[-1] - 1)
    means = [
        block_sum(x[0, list(HEAD_SAMPLE)].float().transpose(1, 2), 128) / count for x in (q, k)
    ]
    want = means[0].transpose(1, 2) @ means[1] * SCALE
    compare(f"means {label} 128/128", got.flatten(0, 1), want.flatten(0, 1), distribution=False)


def check_antidiagonal(q: Tensor, k: Tensor, label: str) -> None:
    length = q.shape[2]
    scores = antidiagonal_scores(q, k, 128, 128, SCALE)
    groups = -(-length // 8)
    q_index = torch.arange(groups * 8, device="cuda").clamp(max=length - 1).view(-1, 8).flip(1)
    got, want = [], []
    for h in HEAD_SAMPLE:
        keys = torch.nn.functional.pad(k[0, h].float(), (0, 0, 0, groups * 8 - length))
        keys = keys.view(groups, 8 * DIM)
        for block in (0, 11, length // 128 - 2):
            rows = q_index[block * 16 : block * 16 + 16]
            logits = q[0, h][rows].float().flatten(1) @ keys.T * (SCALE / 8)
            want.append(block_sum(logits.softmax(-1), 16).mean(0))
            got.append(scores[0, h, block])
    compare(f"antidiagonal {label} 128/128", torch.stack(got), torch.stack(want))


def peak_positions(length: int, block: int) -> Tensor:
    g = torch.Generator().manual_seed(block)
    offsets = torch.randperm(block, generator=g)[: block // 4].sort().values.cuda()
    at = torch.arange(0, length, block, device="cuda")[:, None] + offsets[None]
    return torch.where(at < length, at, -1).to(torch.int32)


def check_peak(q: Tensor, k: Tensor, normalised: bool) -> None:
    qb, kb = 128, 64
    qp, kp = peak_positions(q.shape[2], qb), peak_positions(k.shape[2], kb)
    scores = sampled_peak_scores(q, k, qb, kb, SCALE, qp, kp, normalised=normalised)
    got, want = [], []
    for h in HEAD_SAMPLE:
        columns = k[0, h, kp.flatten().long()].float()
        for block in (0, 9, scores.shape[2] - 1):
            logits = q[0, h, qp[block].long()].float() @ columns.T * SCALE
            top = logits.logsumexp(1) if normalised else logits.amax(1)
            peak = logits.unflatten(1, (-1, kb // 4)).amax(2)
            score = (peak - top[:, None]).exp().amax(0)
            want.append(score / score.sum())
            got.append(scores[0, h, block])
    compare(f"peak normalised={normalised} 128/64", torch.stack(got), torch.stack(want))


def check_selection(length: int) -> None:
    m, n = -(-length // 256), -(-length // 128)
    g = torch.Generator(device="cuda").manual_seed(0)
    scores = (torch.randn(1, HEADS, m, n, device="cuda", generator=g) * 2).softmax(-1)
    scores = (scores * 4096).round() / 4096  # ties
    scores = scores / scores.sum(-1, keepdim=True)
    keep = entropy_budgets(scores, 0.3, 0.05, 1.0, 1.0)
    forced = torch.rand(m, n, device="cuda", generator=g) < 0.01
    counts, indices = select_lists(scores, keep, forced)
    ranked = torch.where(forced, 2.0, scores).sort(dim=-1, descending=True, stable=True).indices
    k = torch.maximum(keep[:, :, None], forced.sum(-1))
    want = torch.zeros_like(scores, dtype=torch.bool)
    want.scatter_(3, ranked, torch.arange(n, device="cuda") < k[..., None])
    got = torch.zeros_like(want)
    real = torch.arange(n, device="cuda") < counts[..., None]
    got.scatter_(3, torch.where(real, indices.long(), indices[..., :1].long()), True)
    ascending = ((indices[..., 1:] > indices[..., :-1]) | ~real[..., 1:]).all().item()
    total = min(max(int(0.3 * n * HEADS + 0.5), HEADS), n * HEADS)
    entropy = -(scores * scores.clamp(min=1e-38).log()).sum(-1) / torch.tensor(float(n)).log()
    row = {
        "lists_equal": torch.equal(got, want) and torch.equal(counts, k.int()),
        "ascending": ascending,
        "budget_total": int(keep.sum()) == total,
        "entropy_error": (row_entropy(scores) - entropy).abs().max().item(),
        "exact_cases": budget_cases(),
    }
    ends = torch.tensor([8, 20, 40, 100], dtype=torch.int32, device="cuda")
    levels = select_levels(scores, ends, (1, 2, 4, 8))
    place = scores.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    ratio = torch.zeros_like(levels)
    for r, end in zip((8, 4, 2, 1), (100, 40, 20, 8), strict=True):
        ratio[place < end] = r
    row["levels_equal"] = torch.equal(levels, ratio)
    counts, _ = levels_to_lists(levels, 2)
    row["level_counts"] = torch.equal(counts.long(), (levels == 2).sum(-1))
    bounds = torch.tensor([0.4, 0.5, 0.6, 0.8], device="cuda")
    got_ends = cumulative_ends(scores, bounds)
    cumulative = scores.double().sort(-1, descending=True).values.cumsum(-1)
    cumulative /= cumulative[..., -1:].clone()
    count = (cumulative[..., None] <= bounds.double() + 1e-6).sum(3)
    want_ends = torch.where(count > 0, count + 1, count).clamp(max=n)
    row["ends_agree"] = (got_ends == want_ends).float().mean().item()
    RESULTS["checks"][f"selection {length}"] = row
    print(f"check selection {length}: {row}", flush=True)


def budget_cases() -> bool:
    cases = [
        ([1.0, 0.02, 0.02, 0.02], 300, 0.5, [300, 100, 100, 100]),
        ([1.0, 1.0, 0.0, 0.0], 100, 0.9, [100, 100, 80, 80]),
        ([0.0, 0.0, 0.0], 7, 0.5, [4, 4, 3]),
    ]
    good = True
    for entropy, n, mean, want in cases:
        given = torch.tensor(entropy, device="cuda")[None, :, None]
        scores = torch.empty(1, len(entropy), 1, n, device="cuda")
        got = entropy_budgets(scores, mean, 0.05, 1.0, 1.0, entropy=given)
        good &= got[0].tolist() == want
    return good


def check_gather(q: Tensor) -> None:
    order = torch.randperm(q.shape[2], device="cuda")
    moved = gather_rows(q, order)
    row = {
        "gather": torch.equal(moved, q[:, :, order]),
        "restore": torch.equal(gather_rows(moved, order.argsort()), q),
    }
    RESULTS["checks"]["gather"] = row
    print(f"check gather {row}", flush=True)


def window_order(frames: int, height: int, width: int) -> Tensor:
    """2 x 8 x 8 windows of a video, strips at the end: the locality a real gather has."""
    t, y, x = torch.meshgrid(
        torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij"
    )
    window = ((t // 2) * 4096 + y // 8) * 4096 + x // 8
    inner = ((t % 2) * 8 + y % 8) * 8 + x % 8
    return (window * 128 + inner).flatten().argsort().cuda()


def time_entropy(q: Tensor, k: Tensor, label: str, sweep: bool) -> None:
    length = q.shape[2]
    positions = spread(length, 256, 4)
    rows = torch.ones(positions.shape[0], dtype=torch.bool, device="cuda")
    forced = torch.zeros(positions.shape[0], -(-length // 128), dtype=torch.bool, device="cuda")
    forced[:, 0] = True

    def chain() -> tuple[Tensor, Tensor]:
        scores = sampled_scores(q, k, 256, 128, SCALE, positions)
        keep = entropy_budgets(scores, 0.3, 0.05, 1.0, 1.0, rows)
        return select_lists(scores, keep, forced)

    measure(f"CHAIN entropy {label}", chain)
    scores = sampled_scores(q, k, 256, 128, SCALE, positions)
    keep = entropy_budgets(scores, 0.3, 0.05, 1.0, 1.0, rows)
    measure(f"  sampled_scores {label}", lambda: sampled_scores(q, k, 256, 128, SCALE, positions))
    measure(f"  entropy_budgets {label}", lambda: entropy_budgets(scores, 0.3, 0.05, 1.0, 1.0))
    for warps in (1, 2, 4) if sweep else (1,):
        measure(
            f"  select_lists {label} warps {warps}",
            lambda w=warps: select_lists(scores, keep, forced, warps=w),
        )
    if not sweep:
        return
    for config in (
        (128, 128, 8, 2),
        (128, 128, 4, 2),
        (128, 128, 8, 3),
        (128, 128, 4, 3),
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (128, 256, 8, 2),
        (256, 128, 8, 2),
    ):
        tile = Tile(*config)
        measure(
            f"    sampled {label} {config}",
            lambda t=tile: sampled_scores(q, k, 256, 128, SCALE, positions, tile=t),
        )
        if out_of_time():
            return


def time_means(q: Tensor, k: Tensor, label: str, sweep: bool) -> None:
    n = -(-q.shape[2] // 128)
    floor = 2 * q.numel() * 2 / 4.3e9
    keep = torch.full((1, HEADS), max(1, n // 5), dtype=torch.int32, device="cuda")
    forced = torch.zeros(n, n, dtype=torch.bool, device="cuda")
    forced[:, -14:] = True
    full = torch.zeros(n, dtype=torch.bool, device="cuda")
    full[-14:] = True

    def chain() -> tuple[Tensor, Tensor]:
        scores = mean_scores(block_means(q, 128), block_means(k, 128), SCALE)
        return select_lists(scores, keep, forced, full)

    measure(f"CHAIN rf_v2 {label}", chain, floor)
    a, b = block_means(q, 128), block_means(k, 128)
    scores = mean_scores(a, b, SCALE)
    for t, w in ((32, 4), (64, 4), (64, 8), (128, 8)) if sweep else ((32, 4),):
        measure(
            f"  block_means of one {label} tokens {t} warps {w}",
            lambda t=t, w=w: block_means(q, 128, tokens=t, warps=w),
            floor / 2,
        )
    for r, c in ((64, 64), (32, 64), (128, 64)) if sweep else ((64, 64),):
        measure(
            f"  mean_scores {label} {r}x{c}",
            lambda r=r, c=c: mean_scores(a, b, SCALE, rows=r, keys=c),
        )
    measure(f"  select_lists {label} 128/128", lambda: select_lists(scores, keep, forced, full))


def time_gather(q: Tensor, frames: int, height: int, width: int, label: str, sweep: bool) -> None:
    order = window_order(frames, height, width).to(torch.int32)
    floor = 2 * q.numel() * 2 / 4.3e9
    options = ((8, 512, 4), (4, 1024, 4), (16, 256, 4), (16, 512, 8), (4, 512, 2))
    for rows, columns, warps in options if sweep else options[:1]:
        measure(
            f"gather one tensor {label} {rows}x{columns} warps {warps}",
            lambda r=rows, c=columns, w=warps: gather_rows(q, order, rows=r, columns=c, warps=w),
            floor,
        )

    def all_four() -> list[Tensor]:
        return [gather_rows(q, order) for _ in range(4)]

    measure(f"CHAIN gather q, k, v + restore {label}", all_four, 4 * floor)


def time_antidiagonal(q: Tensor, k: Tensor, label: str, sweep: bool) -> None:
    n = -(-q.shape[2] // 128)
    keep = torch.full((1, HEADS), max(1, n // 5), dtype=torch.int32, device="cuda")

    def chain() -> tuple[Tensor, Tensor]:
        return select_lists(antidiagonal_scores(q, k, 128, 128, SCALE), keep)

    groups = -(-q.shape[2] // 8)
    floor = 2 * groups**2 * 8 * DIM * HEADS / 700e9
    measure(f"CHAIN ada_bsa {label}", chain, floor)
    if not sweep:
        return
    for config in (
        (128, 256, 8, 3, 64),
        (128, 256, 8, 4, 64),
        (128, 128, 4, 3, 64),
        (128, 128, 8, 3, 64),
        (256, 128, 8, 3, 64),
        (256, 128, 8, 4, 64),
        (128, 256, 8, 3, 32),
    ):
        tile = Tile(*config)
        measure(
            f"    antidiagonal {label} {config}",
            lambda t=tile: antidiagonal_scores(q, k, 128, 128, SCALE, tile=t),
            floor,
        )
        if out_of_time():
            return
    for band in (4, 16):
        measure(
            f"    antidiagonal {label} band {band}",
            lambda b=band: antidiagonal_scores(q, k, 128, 128, SCALE, band=b),
            floor,
        )


def time_peak(q: Tensor, k: Tensor, sweep: bool) -> None:
    qp, kp = peak_positions(q.shape[2], 128), peak_positions(k.shape[2], 64)
    n = kp.shape[0]
    quota = [int(n * u) for u in (0.10, 0.15, 0.15, 0.35)]
    ends = torch.tensor(quota, dtype=torch.int32, device="cuda")
    bounds = torch.tensor([0.4, 0.5, 0.6, 0.8], device="cuda")
    floor = 2 * (qp.numel() * kp.numel()) * DIM * HEADS / 700e9
    for normalised in (False, True):

        def score(tile: Tile | None = None, flag: bool = normalised) -> Tensor:
            return sampled_peak_scores(q, k, 128, 64, SCALE, qp, kp, normalised=flag, tile=tile)

        def chain(score: Callable[[], Tensor] = score) -> Tensor:
            return select_levels(score(), ends, (1, 2, 4, 8))

        label = "softmax" if normalised else "surrogate"
        measure(f"CHAIN psa {label} 32768 128/64", chain, floor)
        scores = score()
        measure(f"  peak scores {label}", score, floor)
        measure("  select_levels", lambda s=scores: select_levels(s, ends, (1, 2, 4, 8)))
        measure("  cumulative_ends", lambda s=scores: cumulative_ends(s, bounds))
        levels = select_levels(scores, ends, (1, 2, 4, 8))
        measure("  levels_to_lists", lambda v=levels: levels_to_lists(v, 2))
        if not sweep:
            continue
        for config in (
            (128, 128, 4, 2),
            (128, 128, 8, 2),
            (128, 128, 4, 3),
            (128, 128, 8, 3),
            (128, 256, 8, 2),
            (256, 128, 8, 2),
            (64, 128, 4, 2),
        ):
            tile = Tile(*config)
            measure(f"    peak {label} {config}", lambda t=tile: score(t), floor)
            if out_of_time():
                return


LIMIT = [170.0]


def out_of_time() -> bool:
    return time.monotonic() - START > LIMIT[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=170.0, help="no new sweep after this")
    parser.add_argument("--skip-sweeps", action="store_true")
    args = parser.parse_args()
    LIMIT[0] = args.seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    data = {name: (tokens(length, 1), tokens(length, 2)) for name, length in SIZES.items()}
    psa = (tokens(PSA_TOKENS, 3), tokens(PSA_TOKENS, 4))

    for name, (q, k) in data.items():
        guarded(f"check sampled {name}", lambda q=q, k=k, n=name: check_sampled(q, k, 256, 128, n))
        guarded(f"check means {name}", lambda q=q, k=k, n=name: check_means(q, k, n))
        guarded(f"check antidiagonal {name}", lambda q=q, k=k, n=name: check_antidiagonal(q, k, n))
        guarded(f"check selection {name}", lambda q=q: check_selection(q.shape[2]))
    q, k = data["480p"]
    guarded("check sampled 192/64", lambda: check_sampled(q, k, 192, 64, "480p"))
    guarded("check sampled 128/192", lambda: check_sampled(q, k, 128, 192, "480p"))
    guarded("check gather", lambda: check_gather(q))
    for normalised in (False, True):
        guarded(f"check peak {normalised}", lambda f=normalised: check_peak(*psa, f))
    print(f"checks done after {time.monotonic() - START:.0f} s", flush=True)

    # The chains first, at both sizes; then the sweeps for as long as there is time.
    for sweep in (False, True):
        if sweep and args.skip_sweeps:
            break
        for name, (q, k) in data.items():
            grid = (21, 30, 52) if name == "480p" else (21, 45, 80)
            for stage in (
                lambda q=q, k=k, n=name, s=sweep: time_entropy(q, k, n, s),
                lambda q=q, k=k, n=name, s=sweep: time_antidiagonal(q, k, n, s),
                lambda q=q, k=k, n=name, s=sweep: time_means(q, k, n, s),
                lambda q=q, g=grid, n=name, s=sweep: time_gather(q, *g, n, s),
            ):
                if sweep and out_of_time():
                    break
                guarded(f"timing {name}", stage)
            if name == "480p" and not (sweep and out_of_time()):
                guarded("timing psa", lambda s=sweep: time_peak(*psa, s))
        print(f"sweep={sweep} done after {time.monotonic() - START:.0f} s", flush=True)

    target = Path(os.environ.get("OUT", ".")) / "planning_gpu.json"
    target.write_text(json.dumps({"device": torch.cuda.get_device_name(), **RESULTS}, indent=1))
    failed = [n for n, c in RESULTS["checks"].items() if not all(v for v in _flags(c))]
    print("failed checks:", failed or "none", "| errors:", list(RESULTS["errors"]) or "none")


def _flags(check: object) -> list[bool]:
    return [v for v in check.values() if isinstance(v, bool)] if isinstance(check, dict) else []


if __name__ == "__main__":
    main()
