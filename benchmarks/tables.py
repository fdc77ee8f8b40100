"""Write the measured tables into README and docs, from benchmarks/results/*.json.

    python benchmarks/tables.py           # rewrite
    python benchmarks/tables.py --check   # exit 1 where a page says something else

A page holds `<!-- table:NAME -->` … `<!-- /table:NAME -->`; what stands between is generated. A
name without results is left as it stands.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def cpu_table() -> str | None:
    result = _newest("cpu-*.json")
    if result is None:
        return None
    lines = [
        _caption(result),
        "",
        "| what | input | budget asked | cost | dense ms | ms | speed-up | execution error "
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


TABLES: dict[str, Callable[[], str | None]] = {
    "cpu": cpu_table,
    "cpu-memory": cpu_memory_table,
    "cpu-growth": cpu_growth_table,
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
    return max(found, key=lambda result: result["date"], default=None)


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
