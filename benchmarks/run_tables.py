"""Tables of whole runs along falling budgets, and of what planning and levels take on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Result = dict[str, Any]
NAMES = {2: "means of 2", 4: "means of 4", 8: "means of 8", 254: "one mean"}


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
        name = row["model"].replace("wan-", "Wan 2.1 1.3B, ")
        lines.append(f"| {name} | {row['method']} | {' | '.join(cells)} | {table} |")
    return "\n".join(lines)


def _times(run: Result | None) -> str:
    return "–" if run is None else f"**{run['speedup']:.2f}×**"


def levels(result: Result) -> str:
    """What rd's parts take in one layer, and what a block takes at each level."""
    return "\n".join([*_parts(result), "", *_levels(result)])


def _parts(result: Result) -> Iterator[str]:
    dense = next(row["ms"] for row in result["rows"] if "dense" in row)
    yield (
        f"{_machine(result)}, one layer of 12 heads of 128 at 480p, where dense attention takes "
        f"{dense:.2f} ms: "
    )
    made = {row["samples"]: row["ms"] for row in result["rows"] if row.get("rd") == "table"}
    told = [f"a table of {samples} samples takes {ms:.2f} ms" for samples, ms in made.items()]
    choosing = [row["ms"] for row in result["rows"] if row.get("rd") == "choosing"]
    told += [f"choosing levels from a kept one {max(choosing):.2f} ms"] if choosing else []
    yield ", ".join(told) + "."


def _levels(result: Result) -> Iterator[str]:
    found = {row["level"]: row for row in result["rows"] if row.get("rd") == "level"}
    if not found:
        return
    yield "| a block read as | of the work | of the time of reading it in full |"
    yield "|---|---:|---:|"
    for level, name in NAMES.items():
        work = 1 / 128 if level == 254 else 1 / level
        yield f"| {name} | {work:.3f} | {found[level]['of_full']:.2f} |"


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
