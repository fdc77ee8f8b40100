"""Write the measured tables into README and docs, from benchmarks/results/*.json.

    python benchmarks/tables.py           # rewrite
    python benchmarks/tables.py --check   # exit 1 where a page says something else

A page holds `<!-- table:NAME -->` … `<!-- /table:NAME -->`; what stands between is generated. A
name without results is left as it stands.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TOTALS = "quality-totals.json"  # of nano


def cpu_table() -> str | None:
    result = _newest("cpu-*.json")
    if result is None:
        return None
    lines = [
        _caption(result),
        "",
        "| what | input | budget asked | cost | dense ms | ms | speed-up | rounding "
        "| error against dense |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["kernel"] + result["whole"]:
        method = f"{row['error_method']:.1%}" if "error_method" in row else "–"
        lines.append(
            f"| {row['case']} | {row.get('inputs', 'gaussian')} | {row['asked']:.2f} "
            f"| {row['cost']:.3f} | {row['dense_seconds'] * 1e3:,.0f} "
            f"| {row['seconds'] * 1e3:,.0f} | **{row['speed_up']:.2f}×** "
            f"| {row['error_execution']:.0e} | {method} |"
        )
    return "\n".join(lines)


def cpu_memory_table() -> str | None:
    result = _newest("cpu-*.json")
    if result is None or "memory" not in result:
        return None
    lines = ["| call | peak extra memory, output included | in sizes of q |", "|---|---:|---:|"]
    for row in result["memory"]:
        size = row["extra_bytes"] / 2**20
        lines.append(f"| {row['case']} | {size:,.0f} MiB | {row['times_q']:.1f} |")
    return "\n".join(lines)


def cpu_growth_table() -> str | None:
    result = _newest("cpu-*.json")
    if result is None or "growth" not in result:
        return None
    lines = [
        "| tokens | dense ms | backend torch at 0.3, ms | entropy at 0.3, whole call, ms |",
        "|---:|---:|---:|---:|",
    ]
    for row in result["growth"]:
        times = " | ".join(f"{row[name] * 1e3:,.0f}" for name in ("dense", "torch", "entropy"))
        lines.append(f"| {row['tokens']:,} | {times} |")
    return "\n".join(lines)


def kernel_table() -> str | None:
    """The README's: per shape and budget, the slower of the two kinds of input."""
    result = _newest("kernel-*.json")
    if result is None:
        return None
    rows = [row for row in result["rows"] if row["why_not"] is None]
    lines = [
        _gpu_caption(result),
        "",
        "| attention | best dense | budget | `fa4` | with planning | `triton` | `flex` "
        "| rounding |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows if row["shape"] != "psa-32k"):
        dense = [r for r in rows if r["shape"] == shape and r["method"] == "dense"]
        best = min(dense, key=lambda row: row["ms"])
        for budget in (0.5, 0.3, 0.2):
            here = [
                r
                for r in rows
                if (r["shape"], r["method"], r["budget"]) == (shape, "entropy", budget)
            ]
            if not here:
                continue
            error = max(r["error"] for r in here if r["backend"] == "fa4")
            lines.append(
                f"| {shape} | {best['ms']:.2f} ms ({best['backend']}) | {budget} "
                f"| **{_slower(here, 'fa4', 'speedup')}** "
                f"| **{_slower(here, 'fa4', 'whole_speedup')}** "
                f"| {_slower(here, 'triton', 'speedup')} | {_slower(here, 'flex', 'speedup')} "
                f"| {error:.1e} |"
            )
    return "\n".join(lines)


def kernel_methods_table() -> str | None:
    """Whole calls of every method on its fastest backend, the slower kind of input."""
    result = _newest("kernel-*.json")
    if result is None:
        return None
    lines = [
        "| attention | method | backend | cost | planning ms | attention ms | whole call ms "
        "| over the best dense | rounding |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    slowest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in result["rows"]:
        if row["why_not"] is None and row["method"] not in ("dense", "entropy"):
            key = (row["shape"], row["method"], row["backend"])
            if key not in slowest or row["whole_speedup"] < slowest[key]["whole_speedup"]:
                slowest[key] = row
    for row in slowest.values():
        lines.append(
            f"| {row['shape']} | {row['method']} | {row['backend']} | {row['cost']:.3f} "
            f"| {row['plan_ms']:.2f} | {row['ms']:.2f} | {row['whole_ms']:.2f} "
            f"| **{row['whole_speedup']:.2f}×** | {row['error']:.1e} |"
        )
    return "\n".join(lines)


def kernel_rows_table() -> str | None:
    """Everything that was measured."""
    result = _newest("kernel-*.json")
    if result is None:
        return None
    lines = [
        _gpu_caption(result),
        "",
        "| shape | inputs | backend | method | asked | cost | ms | TFLOP/s | speed-up | plan ms "
        "| whole ms | whole speed-up | rounding |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        if row["why_not"] is None:
            lines.append(
                f"| {row['shape']} | {row['inputs']} | {row['backend']} | {row['method']} "
                f"| {row['budget']:.3g} | {row['cost']:.3f} | {row['ms']:.3f} "
                f"| {row['tflops']:.0f} | {row['speedup']:.2f}× "
                f"| {_or_dash(row['plan_ms'], '.3f')} "
                f"| {_or_dash(row['whole_ms'], '.3f')} | {_or_dash(row['whole_speedup'], '.2f')} "
                f"| {row['error']:.1e} |"
            )
    return "\n".join(lines)


def methods_table() -> str:
    """Every registered method, from its class: what it does and its options."""
    from jali.methods import METHODS

    lines = ["| method | what it does | options |", "|---|---|---|"]
    for name, kind in METHODS.items():
        text = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        options = ", ".join(f"`{f.name}`" for f in dataclasses.fields(kind)) or "–"
        page = "controls" if name in ("random", "local") else name
        shown = f"`{name}`"
        if (ROOT / "docs" / "methods" / f"{page}.md").exists():
            shown = f"[{shown}](methods/{page}.md)"
        lines.append(f"| {shown} | {' '.join(text.split())} | {options} |")
    return "\n".join(lines)


def planning_table() -> str:
    """What a plan, or rd's table, takes at the size of Wan 2.1 480p: by the methods themselves."""
    import torch

    from jali import Blocks, Method, RateDistortion, TokenGrid
    from jali.correction import correction_share
    from jali.methods import METHODS

    grid, rd = TokenGrid.video(21, 30, 52), RateDistortion()
    looks: list[tuple[str, Method, str]] = [
        ("`entropy`", METHODS["entropy"](), "4 of 256 queries, all keys"),
        ("`psa`", METHODS["psa"](), "a quarter of the queries and of the keys"),
        ("`ada_bsa`", METHODS["ada_bsa"](), "an eighth of all products"),
        ("`rf_v2`", METHODS["rf_v2"](), "means of blocks"),
        ("`rd`", rd, f"{rd.samples} of {rd.q_block} queries, all keys, values and their means"),
    ]
    for estimate, seen in (
        ("mixed", f"{rd.samples // 4} of them so, all of them statistics"),
        ("statistics", f"{rd.samples} queries, means and variances of groups of keys"),
    ):
        looks.append((f"`rd`, {estimate}", dataclasses.replace(rd, estimate=estimate), seen))
    lines = ["| method | looks at | share of a dense call | how often |", "|---|---|---:|---|"]
    for name, method, seen in looks:
        layout = method.layout(grid, None, 0, method.blocks(Blocks(256, 128)), torch.device("cpu"))
        often = "four times a run" if method.keeps_tables else "every call"
        lines.append(f"| {name} | {seen} | {method.planning_share(layout):.3f} | {often} |")
    probed = correction_share(layout, rd.probes, 128)
    seen = f"{rd.probes} queries, all keys and values; then all outputs"
    lines.append(f"| `probes={rd.probes}`, as `rd` has | {seen} | {probed:.3f} | every call |")
    lines += [
        "",
        f"Shares are of arithmetic, for {grid.tokens:,} tokens and heads of 128; times are for the "
        "machine to say.",
    ]
    return "\n".join(lines)


def method_table(name: str) -> str | None:
    """A method's page: whole calls on its fastest backend, the slower kind of input."""
    gpu, cpu = _newest("kernel-*.json"), _newest("cpu-*.json")
    if gpu is None or cpu is None:
        return None
    lines = [
        "| where | attention | setting | backend | cost | whole call ms | speed-up "
        "| rounding | error against dense |",
        "|---|---|---|---|---:|---:|---:|---:|---:|",
    ]
    rows = [
        r for r in gpu["rows"] if r["why_not"] is None and r["method"] not in ("dense", "entropy")
    ]
    rows = [r for r in rows if r["shape"] != "psa-32k" and r["method"].split("-")[0] == name]
    for key in dict.fromkeys((row["shape"], row["method"]) for row in rows):
        own = [row for row in rows if (row["shape"], row["method"]) == key]
        slower = [
            min((r for r in own if r["backend"] == backend), key=lambda r: r["whole_speedup"])
            for backend in {row["backend"] for row in own}
        ]
        row = max(slower, key=lambda r: r["whole_speedup"])
        lines.append(
            f"| {gpu['machine']['gpu'].split()[-1]} | {row['shape']} | {row['method']} "
            f"| {row['backend']} | {row['cost']:.3f} | {row['whole_ms']:.2f} "
            f"| **{row['whole_speedup']:.2f}×** | {row['error']:.1e} | – |"
        )
    for row in cpu["whole"]:
        if row["case"] == f"sparse_attention {name}":
            lines.append(
                f"| CPU, {cpu['machine']['threads']} threads | {cpu['shape']['tokens']:,} tokens, "
                f"{row['inputs']} | budget {row['asked']:g} | torch | {row['cost']:.3f} "
                f"| {row['seconds'] * 1e3:,.0f} | **{row['speed_up']:.2f}×** "
                f"| {row['error_execution']:.0e} | {row['error_method']:.1%} |"
            )
    return "\n".join(lines)


def _slower(rows: list[dict[str, Any]], backend: str, what: str) -> str:
    found = [row[what] for row in rows if row["backend"] == backend and row[what]]
    return f"{min(found):.2f}×" if found else "–"


def _or_dash(value: float | None, how: str) -> str:
    return "–" if value is None else format(value, how)


def _gpu_caption(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = machine["versions"]
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton", "flash-attn-4") if versions[name]
    )
    errors = [(r["method"] == "dense", r["error"]) for r in result["rows"] if r["why_not"] is None]
    worst = {kind: max(error for dense, error in errors if dense == kind) for kind in (False, True)}
    return (
        f"{machine['gpu']}, {packages}, {result['dtype']}, one layer, batch 1; medians, "
        f"{machine['date']}. Speed-up is over the fastest dense kernel of the same run, for the "
        f"slower of two kinds of input (noise, and heads that differ); *rounding* is the error of "
        f"the kernel against fp32 attention over the same plan, at most {worst[False]:.1e} here "
        f"and {worst[True]:.1e} for dense kernels: not what skipping does."
    )


def wan_table() -> str | None:
    """Whole transformers, sparse against dense."""
    runs = [run for run in (_newest("wan-*.json"), _newest("models-*.json")) if run is not None]
    if not runs:
        return None
    machine = runs[0]["machine"]
    versions = machine["versions"]
    packages = ("torch", "triton", "flash-attn-4", "diffusers")
    lines = [
        f"{machine['gpu']}, {', '.join(f'{name} {versions[name]}' for name in packages)}, "
        f"{runs[0]['dtype']}, {machine['date']}. Stock diffusers classes at their real sizes with "
        f"random weights and compiled blocks, planning included, every layer but 0 sparse; "
        f"medians. *Dense* is the same model with FlashAttention-4 in every layer, *stock* the "
        f"model without jali (diffusers' default attention). The errors are those of layer 1's "
        f"attention against fp32 and all keys: of dense attention, which only rounds, and of "
        f"sparse attention, which leaves keys out (random weights look at everything a little).",
        "",
        "| what | tokens | method | cost where sparse | stock ms | dense ms | ms | over dense "
        "| over stock | dense's rounding | error against dense |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [r for run in runs for r in run["rows"] if r["part"] in ("forward", "schedule")]
    rows = [row for row in rows if "layers" not in row]  # with a part of their layers: see the log
    sizes = [row["tokens"] for row in rows if row["model"].startswith("wan-")]
    by_size = {tokens: place for place, tokens in enumerate(sorted(set(sizes)))}
    # Stable: sizes of one model by length, other models as they are.
    rows.sort(key=lambda row: by_size[row["tokens"]] if _is_size(row) else len(by_size))
    return "\n".join([*lines, *(_wan_row(row) for row in rows)])


def _is_size(row: dict[str, Any]) -> bool:
    """Whether a row is of Wan 1.3B, which was run at several sizes."""
    return bool(re.fullmatch(r"wan-\d+p", row["model"]))


# Model, size, and the row of models-*.json that was measured at it; sizes are a model's usual ones.
EXPECTED = (
    ("wan-t2v-14b", 480, 832, 81, "wan-i2v-14b"),
    ("wan-t2v-14b", 720, 1280, 81, None),
    ("wan2.2-t2v-a14b", 480, 832, 81, "wan-i2v-14b"),
    ("wan2.2-t2v-a14b", 720, 1280, 81, None),
    ("wan2.2-ti2v-5b", 704, 1280, 121, "wan2.2-ti2v-5b"),
    ("hunyuan-video", 544, 960, 129, "hunyuan-544p"),
    ("hunyuan-video", 720, 1280, 129, None),
    ("cogvideox-5b", 480, 720, 49, "cogvideox-5b"),
    ("cogvideox1.5-5b", 768, 1360, 81, "cogvideox1.5-5b"),
)


def expect_table() -> str | None:
    """What each model would gain on an H200: forecasts, and the calls that were measured."""
    from jali.experiments import Experiment
    from jali.experiments.scale import forecast

    result = _newest("models-*.json")
    if result is None:
        return None
    measured = {row["model"]: row for row in result["rows"] if row["part"] == "forward"}
    lines = [
        "| model | size | tokens | forecast at 0.5 | forecast at 0.3 | one call at 0.5, measured |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for model, height, width, frames, name in EXPECTED:
        found = []
        for budget in (0.5, 0.3):
            asked = Experiment(
                tag="x", model=model, height=height, width=width, num_frames=frames, budget=budget
            )
            clip = forecast(asked.completed())
            assert clip is not None
            found.append(clip.dense_clip / clip.sparse_clip)
        row = measured.get(name or "")
        call = "–"
        if row is not None:
            seconds = f"{row['dense_ms'] / 1e3:.2f} → {row['ms'] / 1e3:.2f} s"
            call = f"**{row['speedup']:.2f}×** ({seconds})"
        lines.append(
            f"| `{model}` | {width}×{height}, {frames} frames | {clip.tokens:,} "
            f"| {found[0]:.2f}× | {found[1]:.2f}× | {call} |"
        )
    return "\n".join(lines)


def demo_sentence() -> str:
    """How long the demo takes."""
    full, quick = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("demo-2cores", "demo-quick-cpu")
    )
    dense, sparse = full["dense"]["seconds"], full["sparse"]["seconds"]
    return (
        f"On {full['machine']['threads']} CPU cores `jali demo` generates for "
        f"{(dense + sparse) / 60:.0f} minutes ({dense:.0f} s dense, {sparse:.0f} s sparse); "
        f"`jali demo --quick` makes a smaller clip and takes {quick['cpu_seconds']:.0f} s of CPU "
        f"time in all (both measured)."
    )


def _wan_row(row: dict[str, Any]) -> str:
    what, stock = row["model"], row.get("stock_ms")
    if row["part"] == "schedule":
        what += f", {row['steps']} steps, the first {row['dense_steps']} dense"
    over_stock = "–" if stock is None else f"{stock / row['ms']:.2f}×"
    return (
        f"| {what} | {row['tokens']:,} | {row['method']} | {_or_dash(row.get('cost'), '.3f')} "
        f"| {_or_dash(stock, ',.0f')} | {row['dense_ms']:,.0f} | {row['ms']:,.0f} "
        f"| **{row['speedup']:.2f}×** | {over_stock} | {_or_dash(row.get('dense_error'), '.1e')} "
        f"| {_or_dash(row.get('error'), '.1%')} |"
    )


def host_table() -> str | None:
    """What a sparse call costs the host."""
    result = _newest("models-*.json")
    rows = [] if result is None else [r for r in result["rows"] if r["part"] == "host"]
    if result is None or not rows:
        return None
    fast = min(row["allocation_us"] for row in rows)
    slow = max(row["allocation_us_median"] for row in rows)
    lines = [
        f"The host of the same machine, µs per attention call in the middle of a transformer call "
        f"({rows[0]['tokens']:,} tokens, so that the GPU never is what is waited for). *Own* is "
        f"jali's Python; allocations and views are PyTorch's; launches are Triton's, "
        f"FlashAttention-4's and those of two sums. This host has slower phases, in which an "
        f"allocation takes up to {slow:.1f} instead of {fast:.1f} µs: times are the fastest "
        f"medians of {rows[0]['rounds']} rounds over some seconds, and the last column is the "
        f"median round.",
        "",
        "| method | own | allocations and views | launches | whole call | own, median round |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['method']} | **{row['own_us']:.0f}** | {row['host_us'] - row['own_us']:.0f} "
        f"({row['allocations']} and {row['views']}) | {row['launching_us']:.0f} "
        f"| {row['total_us']:.0f} | {row['own_us_median']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def book_table() -> str | None:
    result = _newest("book-*.json")
    if result is None:
        return None
    machine, shape = result["machine"], result["shape"]
    replay, memory, recorded = result["replay"], result["memory"], result["calibration"]
    lines = [
        f"{machine['gpu']}, torch {machine['versions']['torch']}, {shape['dtype']}, "
        f"{shape['tokens']:,} tokens, {shape['heads']} heads × {shape['head_dim']}, "
        f"{shape['query_blocks']} × {shape['key_blocks']} blocks, budget {shape['budget']}; "
        f"medians of {result['repeats']}, {machine['date']}.",
        "",
        "| what | measured |",
        "|---|---:|",
        f"| attention with ready lists (`{replay['backend']}`) | {replay['ready_ms']:.2f} ms |",
        f"| the same, replayed from a book | {replay['replay_ms']:.2f} ms |",
        f"| replay adds to a layer | **{replay['added_us_per_layer']:.0f} µs** "
        f"(its kernel alone: {replay['kernel_us']:.0f} µs) |",
        f"| error of the replayed call against fp32 | {replay['error_against_fp32']:.1e} |",
        f"| GPU memory for masks, lists included | **{memory['peak_mb']:.0f} MB** |",
        f"| change of step, next one ready | {result['step_change']['prefetched_ms']:.2f} ms |",
    ]
    if "slowdown_over_dense" in recorded:
        lines.append(
            f"| recording slows a dense transformer by | "
            f"**{recorded['slowdown_over_dense']:.1%}** ({recorded['layers']} layers) |"
        )
    return "\n".join(lines)


def book_quality_table() -> str | None:
    results = [json.loads(file.read_text("utf-8")) for file in sorted(RESULTS.glob("nano-book*"))]
    parts = []
    for result in results:
        machine = result["machine"]
        where = machine.get("gpu") or f"a CPU, {machine['cpu_threads']} threads"
        parts.append(
            f"{result['model']} on {where}, calibrated on {result['calibrated_on']} prompts; "
            f"{result['prompts']} unseen prompts against their dense runs, budget "
            f"{result['budget']}, blocks of {result['block']}, dense first steps and layer 0, "
            f"{machine['date']}. `random` draws its blocks by lot.\n\n"
            "| replayed at | grid, steps | method | cost of sparse calls | PSNR | SSIM |\n"
            "|---|---|---|---:|---:|---:|\n"
            + "\n".join(_book_quality_row(row) for row in result["rows"])
        )
    return "\n\n".join(parts) or None


def _book_quality_row(row: dict[str, Any]) -> str:
    resampled = row["method"] == "cached" and row["resampled"]
    return (
        f"| {row['where']} | {row['grid']}, {row['steps']} "
        f"| {'cached, resampled' if resampled else row['method']} "
        f"| {row['sparse_cost']:.3f} | {row['psnr']:.2f} | {row['ssim']:.4f} |"
    )


def nano_evidence_table() -> str | None:
    from evidence_tables import evidence

    result = _newest("nano-evidence.json")
    if result is None:
        return None
    first = result["sizes"][0]
    lines = [
        f"{result['machine']['device']}, torch {result['machine']['torch']}, bf16, "
        f"{first['steps']} steps, guidance {first['guidance']}, {first['prompts']} prompts of "
        f"combinations that training never showed, {result['date']}. With 95 % intervals; in "
        f"brackets: what the judge reads from true films.",
        "",
    ]
    return "\n".join([*lines, evidence(result["sizes"])])


def nano_judge_table() -> str | None:
    from evidence_tables import judge

    result = _newest("nano-judge.json")
    return None if result is None else judge(result)


def nano_quality_table() -> str | None:
    """Quality at equal totals."""
    from quality_tables import page

    result = _newest(TOTALS)
    if result is None:
        return None
    picture = "assets/nano-totals.svg"
    return page(result, picture if (ROOT / "docs" / picture).exists() else None)


def curves_table() -> str | None:
    """Curves and floors at equal totals, a part for every size."""
    from curve_tables import page

    files = sorted(RESULTS.glob("curves-nano-*.json"))
    return "\n\n".join(page(json.loads(file.read_text("utf-8"))) for file in files) or None


def clip_times_table() -> str | None:
    """Whole clips on a CPU, a part for every size."""
    from clip_time_tables import page

    files = sorted(RESULTS.glob("clip-times-*.json"), reverse=True)
    return "\n\n".join(page(json.loads(file.read_text("utf-8"))) for file in files) or None


def probes_table() -> str | None:
    """What probes change."""
    from probe_tables import page

    result = _newest(TOTALS)
    return None if result is None else page(result)


def of_totals(name: str) -> str | None:
    """A part of what `quality_tables` makes from the totals."""
    import quality_tables

    result = _newest(TOTALS)
    made: str | None = None if result is None else getattr(quality_tables, name)(result)
    return made


def arena_table() -> str | None:
    """Every method at equal achieved totals."""
    import arena_tables

    return arena_tables.page(arena_tables.read_all(RESULTS), ROOT / "docs")


def layers_table() -> str | None:
    """Every method on single layers, beside clips of as many steps."""
    import arena_tables

    result = _newest("layers-*.json")
    if result is None:
        return None
    found = arena_tables.read_all(RESULTS)
    same = (arena for arena in found if arena.results.settings["steps"] == result["of_steps"])
    return arena_tables.layers_page(result, next(same, None))


def scale_table() -> str:
    """Not measured here: the cost model, which was fitted to measured rows."""
    from scale import table

    return table()


def estimates_table() -> str | None:
    result = _newest("estimates-*.json")
    if result is None:
        return None
    rows: dict[str, dict[float, dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row["method"], {})[row["budget"]] = row
    budgets = list(next(iter(rows.values())))
    layers, steps = (", ".join(map(str, result[name])) for name in ("layers", "steps"))
    lines = [
        f"nano, {result['tokens']:,} tokens, layers {layers} at steps {steps} of "
        f"{result['of_steps']}, {len(result['prompts'])} prompts: means over {result['calls']} "
        f"calls, {result['machine']['date']}. What planning takes is a share of a dense call's "
        "arithmetic, for heads of 128.",
        "",
        f"| estimate | planning | {' | '.join(f'error at {b:g}' for b in budgets)} |",
        "|---|---:|" + "---:|" * len(budgets),
    ]
    for name, own in rows.items():
        errors = " | ".join(f"{own[budget]['error']:.2%}" for budget in budgets)
        lines.append(f"| {name} | {own[budgets[0]]['planning']:.3f} | {errors} |")
    return "\n".join(lines)


def tune_table() -> str | None:
    import tune_tables

    results = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("tune-*.json"))]
    return tune_tables.page(results)


def tune_forecast() -> str | None:
    import tune_tables

    from jali.evaluation.tuning.place import STRENGTHS
    from jali.evaluation.tuning.size import PROBES

    rows = [row for name in ("wan-h200.json", "models-h200.json")
            for row in (_newest(name) or {"rows": []})["rows"]]  # fmt: skip
    return tune_tables.forecast(rows, PROBES, len(STRENGTHS))


def head_order_table() -> str | None:
    """What orders of heads take on every machine that was measured, and what clusters hold."""
    files = sorted(RESULTS.glob("head-order-*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not results:
        return None
    lines = []
    for result in results:
        shape, ms = result["shape"], result["ms"]
        where = f"{result['machine']}, {result['threads']} threads"
        if result["load"] > result["cores"]:
            where += f" (shared with others, load {result['load']:.0f} on {result['cores']} cores)"
        lines += [
            f"{where}, {shape['tokens']:,} tokens, {shape['heads']} heads × {shape['dim']}, "
            f"torch {result['torch']}, {result['date']}:",
            "",
            "| part of a call | ms | of dense attention |",
            "|---|---:|---:|",
            *(
                f"| {name} | {value:,.2f} | {value / ms['dense attention']:.3f} |"
                for name, value in ms.items()
            ),
            "",
        ]
    of = results[-1]["clusters"]
    shares = sorted({row["share"] for row in of["rows"]}, reverse=True)
    lines += [
        f"Exact mass in the best clusters of every row at an equal share of keys, mean of "
        f"{of['calls']} calls of nano ({of['grid']}), clusters of {of['blocks'][0]} queries and "
        f"{of['blocks'][1]} keys, or as many of k-means after {of['kmeans_rounds']} rounds:",
        "",
        "| clusters | " + " | ".join(f"at {share:g}" for share in shares) + " |",
        "|---|" + "---:|" * len(shares),
    ]
    for name in dict.fromkeys(row["clusters"] for row in of["rows"]):
        found = {row["share"]: row["mass"] for row in of["rows"] if row["clusters"] == name}
        lines.append(f"| {name} | " + " | ".join(f"{found[share]:.3f}" for share in shares) + " |")
    return "\n".join(lines)


def stacking_table(name: str, pattern: str) -> str | None:
    """Caches beside sparse attention, and heads among ranks."""
    import stacking_tables

    result = _newest(pattern)
    made: str | None = None if result is None else getattr(stacking_tables, name)(result)
    return made


def of_time(name: str, *others: str) -> str | None:
    """A table of what takes how long, from its own result and perhaps others."""
    import run_tables

    files = {"levels": "methods-h200", "clips": "quality-fa4"}
    paths = [RESULTS / f"{of}.json" for of in (files.get(name, "runs-h200"), *others)]
    if not all(path.exists() for path in paths):
        return None
    results = (json.loads(path.read_text("utf-8")) for path in paths)
    found: str | None = getattr(run_tables, name)(*results)
    return found


TABLES: dict[str, Callable[[], str | None]] = {
    "methods": methods_table,
    "planning-shares": planning_table,
    "scale": scale_table,
    "kernel": kernel_table,
    "book": book_table,
    "book-quality": book_quality_table,
    "nano-evidence": nano_evidence_table,
    "nano-judge": nano_judge_table,
    "nano-quality": nano_quality_table,
    "nano-curves": curves_table,
    "nano-probes": probes_table,
    "clip-times": clip_times_table,
    "nano-reading": functools.partial(of_totals, "reading"),
    "nano-sentence": functools.partial(of_totals, "sentence"),
    "nano-rows": functools.partial(of_totals, "rows_section"),
    "kernel-methods": kernel_methods_table,
    "kernel-rows": kernel_rows_table,
    "wan": wan_table,
    "host": host_table,
    "first": functools.partial(of_time, "first", "quality-totals"),
    "gain": functools.partial(of_time, "gain"),
    "expect": expect_table,
    "demo": demo_sentence,
    "estimates": estimates_table,
    "arena": arena_table,
    "layers": layers_table,
    "runs": functools.partial(of_time, "runs"),
    "levels": functools.partial(of_time, "levels"),
    "clips-fa4": functools.partial(of_time, "clips"),
    "tune": tune_table,
    "tune-forecast": tune_forecast,
    "head-order": head_order_table,
    "head-dealing": functools.partial(stacking_table, "dealing", "head-dealing.json"),
    "stacking": functools.partial(stacking_table, "stacking", "stacking-*.json"),
    "stacking-judged": functools.partial(stacking_table, "judged", "stacking-*.json"),
    "cpu": cpu_table,
    "cpu-memory": cpu_memory_table,
    "cpu-growth": cpu_growth_table,
    **{
        f"method-{name}": functools.partial(method_table, name)
        for name in ("entropy", "psa", "rf_v2", "ada_bsa")
    },
}


def _caption(result: dict[str, Any]) -> str:
    machine, shape, versions = result["machine"], result["shape"], result["versions"]
    return (
        f"{machine['cpu']}, {machine['threads']} threads, torch {versions['torch']}, "
        f"{result['dtype']}, {shape['heads']} heads × {shape['head_dim']}, "
        f"{shape['tokens']:,} tokens; medians of {result['repeats']} interleaved runs, "
        f"{result['date']}. Dense is `scaled_dot_product_attention` in the same run."
    )


def _newest(pattern: str) -> dict[str, Any] | None:
    found = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob(pattern)]
    return max(found, key=_date, default=None)


def _date(result: dict[str, Any]) -> str:
    return str(result.get("date") or result["machine"]["date"])


def filled(text: str) -> str:
    """The page with every table that has results."""
    for name, make in TABLES.items():
        table = make()
        if table is None:
            continue
        between = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- /table:{name} -->)", re.DOTALL)
        text = between.sub(lambda found, t=table: f"{found[1]}{t}\n{found[2]}", text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit 1 on a difference"
    )
    check = parser.parse_args().check
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new == text:
            continue
        stale.append(str(page.relative_to(ROOT)))
        if not check:
            page.write_text(new, encoding="utf-8")
    if check and stale:
        sys.exit(f"tables out of date in {', '.join(stale)}: run python benchmarks/tables.py")
    for name in stale:
        print(f"rewritten: {name}")


if __name__ == "__main__":
    main()
