"""The table of probes, from results/quality-totals.json: every method with and without them.

Each row with probes is compared, clip by clip, with the same method without at the same total on
the same schedule; and rd with what else has as many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from quality_tables import Results, Row, best, difference, share, short, table

from jali.methods import METHODS

HEAD = ["steps", "total", "schedule", "method", "PSNR", "probes", "planning", "PSNR", "difference"]
PROBES = re.compile(r",?probes=(\d+)")


def page(told: dict[str, Any]) -> str:
    """What was run, the table, and who is ahead where all have probes."""
    results, size = Results(told), told["size"]
    caption = (
        f"nano, {size['height']}×{size['width']}×{size['num_frames']}, {told['tokens']:,} tokens, "
        f"{len(told['prompts'])} held-out prompts, {told['machine']['device']}, {told['date']}. "
        f"PSNR in dB against the dense run without probes and with them, and the difference, mean "
        f"over clips ± its 95 % interval. Planning counts them."
    )
    parts = [caption, table(HEAD, rows(results), 4), *sentences(results)]
    return "\n\n".join(parts)


def split(row: Row) -> tuple[str, int]:
    """A method without its probes, and how many it has."""
    text = row["method"]
    known = PROBES.search(text)
    # What a method has where nothing is said; other names are of books and the like.
    kind = METHODS.get(text.partition(":")[0])
    count = int(known[1]) if known else 0 if kind is None else kind().probes
    name, _, options = PROBES.sub("", text).partition(":")
    options = options.strip(",")
    return f"{name}:{options}" if options else name, count


def rows(results: Results) -> list[list[str]]:
    """Those with probes, each beside itself without."""
    plain = {(split(row)[0], _place(row)): row for row in results.rows if split(row)[1] == 0}
    found = []
    for row in results.rows:
        method, count = split(row)
        other = plain.get((method, _place(row)))
        if count and other is not None:
            said = [str(row["steps"]), share(row["total"]), short(row["schedule"]), f"`{method}`"]
            numbers = [f"{other['psnr']:.2f}", str(count), f"{row['planning']:.3f}"]
            found.append([*said, *numbers, f"{row['psnr']:.2f}", difference(row, other)])
    return sorted(found, key=lambda cells: (int(cells[0]), -float(cells[1]), cells[3]))


def _place(row: Row) -> tuple[Any, ...]:
    return row["schedule"], row["total"], row["steps"]


def sentences(results: Results) -> Iterator[str]:
    """rd against every other method that was given as many probes, on its better schedule."""
    for steps in results.steps:
        found = []
        for total in results.totals(steps):
            here = results.some(steps=steps, total=total)
            own = best(row for row in here if row["method"] == "rd")
            others = (r for r in here if not r["method"].startswith("rd"))
            other = own and best(r for r in others if split(r)[1] == split(own)[1])
            if own and other:
                name, _ = split(other)
                found.append(f"{difference(own, other)} dB at {share(total)} (`{name}`)")
        if found:
            yield f"rd against the best other with as many probes, {steps} steps: " + (
                ", ".join(found) + "."
            )
