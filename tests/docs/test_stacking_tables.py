"""The tables of caches beside sparse attention, from made-up results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import stacking_tables


def row(prompt: int, cache: str, sparse: str, seconds: float, psnr: float | None) -> dict[str, Any]:
    skipped = 0 if cache == "none" else 48
    return {
        "prompt": prompt, "cache": cache, "sparse": sparse, "seconds": seconds, "psnr": psnr,
        "skipped": skipped, "calls": 192, "attention": 0.5,
    }  # fmt: skip


RESULT: dict[str, Any] = {
    "rows": [
        row(prompt, cache, sparse, unit * seconds, psnr)
        for prompt, unit in enumerate((1.0, 3.0))  # a machine that got slower meanwhile
        for cache, sparse, seconds, psnr in (
            ("none", "none", 12, None), ("none", "entropy", 8, 30.0 + prompt),
            ("none", "entropy, first block sparse", 6, 29.0), ("first block", "none", 6, 40.0),
            ("first block", "entropy", 5, 28.0),
            ("first block", "entropy, first block sparse", 4, 27.0),
        )
    ],
    "size": {"height": 8, "width": 8, "num_frames": 5}, "steps": 4, "guidance": 4.0,
    "machine": "x", "torch": "2", "date": "today",
}  # fmt: skip


def test_speedups_are_of_the_same_prompt_and_may_be_less_than_their_product() -> None:
    none, first = stacking_tables.stacking(RESULT).splitlines()[-2:]
    assert none == ("| no cache | 0% | 1.00× | 0.50 | = | 0% | **1.50×** | 1.50× | 0.50 | 30.5 |")
    assert first == (
        "| first-block cache | 25% | 2.00× | 0.50 | 40.0 | 25% | **2.40×** | 3.00× | 0.50 | 28.0 |"
    )


def test_what_a_cache_judges_by() -> None:
    last = stacking_tables.judged(RESULT).splitlines()[-1]
    assert last == "| `entropy`, first block sparse | 25% | 3.00× | 27.0 | 29.0 |"
