"""The tables of curves and floors, from results/curves-nano*.json: what `nano_quality.py` measured.

Curves given as numbers have a name in the file (`names`): one family is other numbers at another
total. Each is compared with the exponential curve at the same total, clip by clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quality_tables import Results, Row, difference, share, table

BASE = "exponential"


def page(told: dict[str, Any]) -> str:
    """All of it, for every method and number of steps."""
    return "\n\n".join([caption(told), *tables(told)])


def caption(told: dict[str, Any]) -> str:
    size = told["size"]
    return (
        f"nano, {size['height']}×{size['width']}×{size['num_frames']}, {told['tokens']:,} tokens, "
        f"{len(told['prompts'])} held-out prompts, {told['dtype']} on a CPU, torch "
        f"{told['machine']['torch']}, {told['date']}. PSNR in dB against the dense run at equal "
        f"achieved totals, and its difference to the exponential curve, mean over clips ± its "
        f"95 % interval."
    )


def tables(told: dict[str, Any]) -> Iterator[str]:
    results, names = Results(told), told["names"]
    for steps in results.steps:
        totals = results.totals(steps)
        curves = dict.fromkeys(names.get(r["schedule"], r["schedule"]) for r in results.rows)
        rows = [
            [f"`{method}`", curve, *cells]
            for method in results.methods
            for curve in curves
            if any(cells := [cell(results, names, method, curve, t, steps) for t in totals])
        ]
        yield f"**{steps} steps**"
        yield table(["method", "curve", *(f"total {share(t)}" for t in totals)], rows, 2)


def cell(
    results: Results, names: dict[str, str], method: str, curve: str, total: float, steps: int
) -> str:
    """PSNR of a curve at a total, the best of its column in bold."""
    here = results.some(method=method, total=total, steps=steps)
    made: dict[str, Row] = {names.get(r["schedule"], r["schedule"]): r for r in here}
    if curve not in made:
        return ""
    row, base = made[curve], made.get(BASE)
    text = f"{row['psnr']:.1f}"
    if len(made) > 1 and row["psnr"] == max(r["psnr"] for r in here):
        text = f"**{text}**"
    return text if base is None or row is base else f"{text} ({difference(row, base)})"
