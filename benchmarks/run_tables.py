"""Tables of whole runs along falling budgets, and of what planning and levels take on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jali.planning.curve import Curve

Result = dict[str, Any]
MODELS = {
    "wan-480p": "Wan 2.1 1.3B, 480p",
    "wan-720p": "Wan 2.1 1.3B, 720p",
    "wan-14b-720p": "Wan 2.1 14B, 720p",
    "hunyuan-544p": "HunyuanVideo, 544p",
    "cogvideox-5b": "CogVideoX 5B",
}
# What runs are called here, and the rows of nano's clips that were made with the same options.
TOLD = {"entropy": "entropy", "rd, no probes": "rd:probes=0", "rd": "rd"}
TOTALS, STEPS = (0.5, 0.4, 0.3), 30
ESA = "ESA's schedule, 0.54"
NAMES = {2: "means of 2", 4: "means of 4", 8: "means of 8", 254: "one mean"}


def first(result: Result, quality: Result) -> str:
    """What a newcomer wants to know: how much faster whole runs are, and what that costs."""
    rows = {(row["model"], row["method"]): row for row in result["rows"] if row["part"] == "run"}
    models = [model for model in MODELS if any(model == found for found, _ in rows)]
    whole = next((row for row in result["rows"] if row["part"] == "whole run"), None)
    lines = [
        f"{_machine(result)}: all transformer calls of 50 steps, planning included, over the same "
        f"model with FlashAttention-4 in the same process. Stock diffusers classes with random "
        f"weights and compiled blocks; calls were timed at five or six budgets and added up along "
        f"the falling ones{_checked(whole)}. PSNR against the dense clip is of "
        f"[nano](docs/nano.md), {STEPS} steps, {len(quality['prompts'])} prompts: that "
        f"equal work means equal quality in another model is a forecast. The 64 probes of `rd` as "
        f"it comes were not timed in whole runs.",
        "",
        f"| all attention work | nano's PSNR | {' | '.join(MODELS[model] for model in models)} |",
        f"|---|---:|{'---:|' * len(models)}",
    ]
    cells = [_times(rows[model, "entropy"]["runs"].get(ESA)) for model in models]
    psnr = _psnr(quality, "entropy", "esa", 0.54)
    lines.append(f"| 0.54, `entropy`, ESA's schedule | {psnr} | {' | '.join(cells)} |")
    for total, (name, spec) in itertools.product(TOTALS, TOLD.items()):
        found = [rows.get((model, name)) for model in models]
        cells = ["–" if row is None else f"**{speedup(row, total):.2f}×**" for row in found]
        psnr = _psnr(quality, spec, "exponential", total)
        if psnr != "–":
            label, _, rest = name.partition(", ")
            said = f"`{label}`" + (f", {rest}" if rest else "")
            lines.append(f"| {total:g}, {said} | {psnr} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _checked(whole: Result | None) -> str:
    if whole is None:
        return ""
    return (
        f" (one run of all 50 steps, one after the other, {whole['method']}, at "
        f"{whole['total']:g}: {whole['speedup']:.2f}×)"
    )


def _psnr(quality: Result, method: str, schedule: str, total: float) -> str:
    for row in quality["rows"]:
        found = row["method"], row["schedule"], row["total"], row["steps"]
        if found == (method, schedule, total, STEPS):
            return f"{row['psnr']:.1f} dB"
    return "–"


def speedup(row: Result, total: float) -> float:
    """Of a whole run at a total, from the times of its calls."""
    times = {float(budget): ms for budget, ms in row["step_ms"].items()}
    curve = [budgets[0] for budgets in Curve(total).budgets(row["steps"], 1)]
    tables = 4 * row["table_ms"] if row["method"].startswith("rd") else 0.0
    ms = sum(along(times, row["dense_ms"], curve)) + tables
    return row["steps"] * row["dense_ms"] / ms  # type: ignore[no-any-return]


def along(times: dict[float, float], dense: float, budgets: Sequence[float]) -> list[float]:
    """Milliseconds of the steps of such budgets, by straight lines between those measured."""
    points = sorted({**times, 1.0: dense}.items())

    def at(budget: float) -> float:
        if budget >= 1:
            return dense
        for (low, a), (high, b) in itertools.pairwise(points):
            if budget <= high or high == 1.0:
                return a + (max(budget, low) - low) / (high - low) * (b - a)
        raise AssertionError(budget)

    return [at(budget) for budget in budgets]


def gain(result: Result) -> str | None:
    """Two lines for the top of the page."""
    rows = {(row["model"], row["method"]): row for row in result["rows"] if row["part"] == "run"}
    row = rows.get(("wan-720p", "entropy"))
    if row is None:
        return None
    low, high = (f"{speedup(row, total):.1f}×" for total in (0.5, 0.3))
    return (
        f"All steps of a generation together get **{low} to {high} faster** than with "
        f"FlashAttention-4, where `entropy` does a half or three tenths of the attention work: Wan "
        f"2.1 1.3B at 720p on an {result['machine']['gpu']}, 50 steps, everything included that "
        f"planning takes (measured with random weights, {result['machine']['date']})."
    )


def runs(result: Result) -> str:
    """Speed-ups of whole runs, by model and method."""
    rows = [row for row in result["rows"] if row["part"] == "run"]
    asked = list(dict.fromkeys(total for row in rows for total in row["runs"]))
    lines = [
        f"{_machine(result)}. Random weights, compiled blocks, 50 steps; transformer calls timed "
        f"at some budgets and added up along the exponential curve, over dense FlashAttention-4 of "
        f"the same run. rd's levels are drawn from errors of nano's runs.",
        "",
        f"| model | method | {' | '.join(asked)} | a table |",
        f"|---|---|{'---:|' * len(asked)}---:|",
    ]
    for row in rows:
        cells = (_times(row["runs"].get(total)) for total in asked)
        table = f"{row['table_ms']:.0f} ms" if row["method"].startswith("rd") else "–"
        lines.append(
            f"| {MODELS[row['model']]} | {row['method']} | {' | '.join(cells)} | {table} |"
        )
    return "\n".join(lines)


def _times(run: Result | None) -> str:
    return "–" if run is None else f"**{run['speedup']:.2f}×**"


def levels(result: Result) -> str:
    """What rd's parts take in one layer, and what a block takes at each level."""
    sizes = {row["size"]: row["ms"] for row in result["rows"] if "dense" in row}
    told = ", ".join(f"{ms:.2f} ms at {size}" for size, ms in sizes.items())
    rows = [f"| {name} |{cells}" for name, cells in _parts(result, list(sizes))]
    return "\n".join(
        [
            f"{_machine(result)}, one layer of 12 heads of 128, dense attention {told}:",
            "",
            f"| | {' | '.join(sizes)} |",
            f"|---|{'---:|' * len(sizes)}",
            *rows,
        ]
    )


def _parts(result: Result, sizes: list[str]) -> Iterator[tuple[str, str]]:
    """What something is, and the cells of it at every size."""
    rows = result["rows"]

    def cells(form: str, value: str, **asked: object) -> str:
        found = []
        for size in sizes:
            of = [row for row in rows if asked.items() <= row.items() and row["size"] == size]
            found.append(form.format(max(row[value] for row in of)) if of else "–")
        return f" {' | '.join(found)} |"

    for samples in (4, 8):
        yield f"a table, {samples} samples", cells("{:.2f} ms", "ms", rd="table", samples=samples)
    yield (
        "and what is left of the work at every price",
        cells("{:.2f} ms", "ms", rd="work left at every price"),
    )
    yield "choosing levels from a kept table", cells("{:.2f} ms", "ms", rd="choosing")
    for level, name in NAMES.items():
        work = 1 / 128 if level == 254 else 1 / level
        label = f"a block read as {name} ({work:.3f} of the work), over reading it in full"
        yield label, cells("{:.2f}", "of_full", rd="level", level=level)
    for kind in ("all levels", "mean, skip"):
        yield (
            f"attention with a kept table at 0.3, {kind}, over dense",
            cells("{:.2f}×", "speedup_with_choosing", rd=f"attention, {kind}", budget=0.3),
        )


def clips(result: Result) -> str:
    """PSNR of nano's clips where FlashAttention-4 runs, with the blocks that it likes."""
    lines = [
        f"nano, 192×320×37, 12 steps, {len(result['prompts'])} prompts, {result['device']} with "
        f"FlashAttention-4, {result['date']}; exponential curve.",
        "",
        "| method | total | planning | PSNR |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| `{row['method']}` | {row['achieved']:.2f} | {row['planning']:.3f} | {row['psnr']:.1f} |"
        for row in result["rows"]
        if row["schedule"] == "exponential"
    ]
    return "\n".join(lines)


def _machine(result: Result) -> str:
    machine = result["machine"]
    versions = machine["versions"]
    return (
        f"{machine['gpu']}, torch {versions['torch']}, triton {versions['triton']}, flash-attn-4 "
        f"{versions['flash-attn-4']}, {machine['date']}"
    )
