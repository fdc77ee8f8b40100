"""Tables from results/tune-*.json: what `tune_nano.py` has measured.

Whatever rows there are is shown; nothing is said of rows that are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

Row = dict[str, Any]
NAMES = {"moved": "work moved by probes", "linear": "linear curve", "recipe": "the recipe"}


def page(results: Sequence[dict[str, Any]]) -> str | None:
    """A caption and two tables for every file: targets, and spreads of the same total."""
    parts = ["\n".join(_lines(one)) for one in results if one["rows"]]
    return "\n\n".join(parts) or None


def _lines(told: dict[str, Any]) -> Iterator[str]:
    rows = sorted(told["rows"], key=lambda row: (row["method"], row["target"]))
    size = told["size"]
    half = len(told["prompts"]) // 2
    yield (
        f"nano on {told['device']}, {size['height']}×{size['width']}×{size['num_frames']}, "
        f"{told['steps']} steps, {told['dtype']}, {told['date']}: "
        f"{half} prompts find, {half} judge, {told['probes']} probes; "
        f"{len(told['others'])} other prompts are seen once."
    )
    yield ""
    yield (
        "| method | target | total | found at | the recipe states | one more clip | other prompts "
        "| inside | tuned in |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---|---:|"
    yield from map(_target, rows)
    compared = [row for row in rows if row.get("against")]
    if compared:
        yield ""
        yield from _spreads(compared)


def _target(row: Row) -> str:
    took = f"{row['seconds']:.0f} s{' in parts' if row['cut'] else ''}"
    start = f"| `{row['method']}` | {row['target']:g} dB "
    if row.get("dense"):
        return f"{start}| dense | | | | | | {took} |"
    found = row["recipe"]["measured"]["metrics"]["psnr"]
    deciding = row["deciding"]["psnr"]
    inside = row["inside"]
    return (
        f"{start}| {row['recipe']['curve']['total']:g} "
        f"| {'' if deciding is None else f'{deciding:.1f}'} "
        f"| {found['mean']:.1f}{_range(found['low'], found['high'])} "
        f"| {_range(found['next_low'], found['next_high']).strip(' ()')} "
        f"| {inside['mean']:.1f} | {_inside(inside)} | {took} |"
    )


def _inside(inside: Row) -> str:
    """Of the interval of the mean; where it is not, of the one for a mean of so many others."""
    if inside["interval_of_mean"] is None:
        return ""
    if inside["interval_of_mean"]:
        return "yes"
    wider = inside.get("interval_of_mean_of_others")
    return "no, but within what both means leave open" if wider else "**no**"


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" ({low:.1f} to {high:.1f})"


def _spreads(rows: Sequence[Row]) -> Iterator[str]:
    names = [name for name in NAMES if any(name in row["against"] for row in rows)]
    yield (
        "| method | total | exponential curve | "
        + " | ".join(f"{NAMES[name]} instead" for name in names)
        + " |"
    )
    yield "|---|---:|---:|" + "---:|" * len(names)
    for row in rows:
        base = fmean(row["others"]["exponential"]["psnr"])
        cells = [_difference(row["against"].get(name)) for name in names]
        total = row["recipe"]["curve"]["total"]
        yield f"| `{row['method']}` | {total:g} | {base:.1f} dB | {' | '.join(cells)} |"


def _difference(found: Row | None) -> str:
    if found is None:
        return ""
    half = "" if found["low"] is None else f" ± {found['mean'] - found['low']:.2f}"
    return f"{found['mean']:+.2f}{half} dB".replace("-", "−")


# A forecast

STEPS, BRANCHES = 50, 2  # of Wan: each step calls the transformer with and without the prompt
PROMPTS, METHODS, TRIES = 8, 2, 4  # of `jali tune` as it comes; tries are the usual number
FORECAST = (
    ("Wan 2.1 1.3B, 480p", "wan-480p"), ("Wan 2.1 1.3B, 720p", "wan-720p"),
    ("Wan 2.1 14B, 480p (timed as I2V)", "wan-i2v-14b"),
)  # fmt: skip


def forecast(rows: Sequence[Row], probes: int, moves: int) -> str | None:
    """How long a tuning would take: so many clips, by measured seconds of a transformer call."""
    known = {
        row["model"]: row
        for row in rows
        if row.get("part") == "forward" and row["method"] == "entropy 0.5"
    }
    half = PROMPTS // 2
    plain = half * (METHODS * TRIES + 1 + 1)  # totals, the linear curve, and the held-out clips
    more = half * (probes + moves)
    lines = [
        f"A forecast, not measured: {PROMPTS} dense clips, {plain} sparse ones of {METHODS} "
        f"methods (all as long as entropy at 0.5) and {more} of probes, {STEPS} steps × "
        f"{BRANCHES} calls of the transformer each, on one H200 in bf16; without text "
        f"encoder and decoder.",
        "",
        "| model | a dense call | a sparse call | tuning with `--probes 0` | with all probes |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, model in FORECAST:
        if model in known:
            dense, sparse = (known[model][key] / 1e3 for key in ("dense_ms", "ms"))
            calls = STEPS * BRANCHES
            few = calls * (PROMPTS * dense + plain * sparse) / 3600
            all_ = few + calls * more * sparse / 3600
            lines.append(
                f"| {name} | {dense:.2f} s | {sparse:.2f} s | {few:.1f} hours | {all_:.1f} hours |"
            )
    return "\n".join(lines) if len(lines) > 4 else None
