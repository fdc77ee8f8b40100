"""The table of probes sets a method beside itself, at the same total on the same schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import probe_tables


def row(method: str, *psnr: float, total: float = 0.4) -> Any:
    at = {"method": method, "schedule": "exponential", "total": total, "steps": 12}
    mean = sum(psnr) / len(psnr)
    return at | {"psnr": mean, "achieved": total, "planning": 0.02, "clips": {"psnr": list(psnr)}}


def page(*rows: Any) -> str:
    return probe_tables.page(
        {
            "rows": list(rows), "tokens": 9600, "prompts": ["a", "b", "c"], "date": "2026-11-18",
            "size": {"height": 192, "width": 320, "num_frames": 37}, "machine": {"device": "H200"},
        }
    )  # fmt: skip


def test_each_row_stands_beside_itself():
    found = page(
        row("entropy:q_block=128", 36.0, 37.0, 38.0),
        row("rd:probes=128", 41.0, 42.0, 43.0),
        row("entropy:probes=128,q_block=128", 38.0, 39.0, 40.0),
        row("rd:probes=0", 38.0, 39.0, 40.0), row("rd", 1.0, 2.0, 3.0, total=0.2),
        row("psa:probes=64", 20.0, 20.0, 20.0), row("cached", 30.0, 30.0, 30.0),
    )  # fmt: skip
    assert "3 held-out prompts" in found
    assert [line for line in found.splitlines() if line.startswith("| 12")] == [
        "| 12 | 0.40 | exp | `entropy:q_block=128` | 37.00 | 128 | 0.020 | 39.00 | +2.0 ± 0.0 |",
        "| 12 | 0.40 | exp | `rd` | 39.00 | 128 | 0.020 | 42.00 | +3.0 ± 0.0 |",
    ]


def test_rd_has_probes_unasked_and_is_compared_with_what_has_as_many():
    found = page(
        row("rd", 40.0, 41.0, 42.0), row("rd:probes=0", 37.0, 38.0, 39.0),
        row("entropy", 36.0, 37.0, 38.0), row("entropy:probes=64", 40.0, 41.0, 41.0),
        row("entropy:probes=128", 44.0, 44.0, 44.0), row("rd:samples=8", 43.0, 44.0, 45.0),
    )  # fmt: skip
    assert "| 12 | 0.40 | exp | `rd` | 38.00 | 64 | 0.020 | 41.00 | +3.0 ± 0.0 |" in found
    assert found.endswith(
        "rd against the best other with as many probes, 12 steps: +0.3 ± 1.4 dB at 0.40 "
        "(`entropy`)."
    )
