"""The tables of curves name a family once, mark the best, and leave empty what was not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import curve_tables

SIZE = {"height": 128, "width": 128, "num_frames": 33}


def row(curve: str, total: float, *psnr: float, method: str = "rd", steps: int = 12) -> Any:
    at = {"method": method, "schedule": curve, "total": total, "steps": steps}
    return at | {"psnr": sum(psnr) / len(psnr), "achieved": total, "clips": {"psnr": list(psnr)}}


def told(*rows: Any, **names: str) -> dict[str, Any]:
    return {
        "rows": list(rows), "names": names, "size": SIZE, "tokens": 2304,
        "prompts": ["a", "b", "c"], "dtype": "float32", "date": "2026-11-18",
        "machine": {"torch": "2.13.0"},
    }  # fmt: skip


def test_a_family_of_curves_is_one_line():
    page = curve_tables.page(
        told(
            row("exponential", 0.4, 30.0, 31.0, 32.0), row("1,.5", 0.4, 31.0, 32.0, 33.0),
            row("exponential", 0.3, 20.0, 21.0, 22.0), row("1,.3", 0.3, 19.0, 20.0, 21.0),
            **{"1,.5": "halves", "1,.3": "halves"},
        )
    )  # fmt: skip
    assert "128×128×33, 2,304 tokens, 3 held-out prompts" in page
    assert "| `rd` | exponential | 31.0 | **21.0** |" in page
    assert "| `rd` | halves | **32.0** (+1.0 ± 0.0) | 20.0 (-1.0 ± 0.0) |" in page
    assert page.count("halves") == 1


def test_what_was_not_run_stays_empty():
    page = curve_tables.page(
        told(
            row("exponential", 0.4, 30.0, 32.0), row("linear", 0.3, 20.0, 22.0),
            row("linear", 0.3, 18.0, 18.0, method="entropy", steps=30),
        )
    )  # fmt: skip
    twelve, thirty = page.split("**30 steps**")
    assert "| `rd` | exponential | 31.0 |  |" in twelve
    assert "| `rd` | linear |  | 21.0 |" in twelve
    assert "entropy" not in twelve
    assert "`rd`" not in thirty
    assert "| `entropy` | linear | 18.0 |" in thirty
