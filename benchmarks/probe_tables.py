"""The table of probes, from results/probes-nano*.json: every method with and without them.

Each row with probes is compared, clip by clip, with the same method without at the same total.
"""

from __future__ import annotations

import re
from typing import Any

from quality_tables import Results, difference, share, short, table

HEAD = ["steps", "total", "schedule", "method", "PSNR", "probes", "planning", "PSNR", "difference"]
PROBES = re.compile(r"probes=(\d+),?")


def page(told: dict[str, Any]) -> str:
    """What was run, and the table."""
    size = told["size"]
    caption = (
        f"nano, {size['height']}×{size['width']}×{size['num_frames']}, {told['tokens']:,} tokens, "
        f"{len(told['prompts'])} held-out prompts, {told['dtype']} on a CPU, torch "
        f"{told['machine']['torch']}, {told['date']}. PSNR in dB against the dense run, and what "
        f"probes change, mean over clips ± its 95 % interval. Planning counts them."
    )
    return f"{caption}\n\n{table(HEAD, rows(Results(told)), 4)}"


def rows(results: Results) -> list[list[str]]:
    """Those with probes, each beside itself without."""
    found = []
    for row in results.rows:
        known = PROBES.search(row["method"])
        if known is None:
            continue
        method = PROBES.sub("", row["method"]).strip(":,")
        plain = results.some(
            method=method, schedule=row["schedule"], total=row["total"], steps=row["steps"]
        )
        for other in plain:
            said = [str(row["steps"]), share(row["total"]), short(row["schedule"]), f"`{method}`"]
            numbers = [f"{other['psnr']:.2f}", known[1], f"{row['planning']:.3f}"]
            found.append([*said, *numbers, f"{row['psnr']:.2f}", difference(row, other)])
    return found
