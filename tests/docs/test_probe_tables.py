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


def test_each_row_stands_beside_itself():
    page = probe_tables.page(
        {
            "rows": [
                row("entropy:q_block=128", 36.0, 37.0, 38.0),
                row("rd:probes=128", 41.0, 42.0, 43.0),
                row("entropy:probes=128,q_block=128", 38.0, 39.0, 40.0),
                row("rd", 38.0, 39.0, 40.0), row("rd", 1.0, 2.0, 3.0, total=0.2),
                row("psa:probes=64", 20.0, 20.0, 20.0),
            ],
            "size": {"height": 192, "width": 320, "num_frames": 37}, "tokens": 9600,
            "prompts": ["a", "b", "c"], "dtype": "float32", "date": "2026-11-18",
            "machine": {"torch": "2.13.0"},
        }
    )  # fmt: skip
    assert "3 held-out prompts" in page
    found = [line for line in page.splitlines() if line.startswith("| 12")]
    assert found == [
        "| 12 | 0.40 | exp | `rd` | 39.00 | 128 | 0.020 | 42.00 | +3.0 ± 0.0 |",
        "| 12 | 0.40 | exp | `entropy:q_block=128` | 37.00 | 128 | 0.020 | 39.00 | +2.0 ± 0.0 |",
    ]
