"""The table of whole clips compares times of one prompt with each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import clip_time_tables


def run(seconds: float, psnr: float) -> dict[str, float]:
    return {"seconds": seconds, "psnr": psnr, "achieved": 0.4, "planning": 0.02}


def test_ratios_are_of_one_prompt() -> None:
    slow, fast = "entropy esa 0.54 12", "rd exponential 0.4 12"
    clips = {
        f"prompt {i}": {"dense": {"seconds": 10.0 * i}, slow: run(8.0 * i, 30.0 + i),
                        fast: run((6.0 + 0.1 * i) * i, 31.0 + i)}
        for i in (1, 2, 3)
    }  # fmt: skip
    result: dict[str, Any] = {
        "size": {"height": 128, "width": 128, "num_frames": 33}, "tokens": 2304, "steps": 12,
        "machine": {"threads": 2, "cpu": "some", "torch": "2.13"}, "date": "2026-11-19",
        "clips": clips,
    }  # fmt: skip
    assert clip_time_tables.page(result).splitlines()[-3:] == [
        "| dense | 1 | – | – | 20.0 | 1 | – |",
        "| `entropy esa 0.54` | 0.400 | 0.020 | 32.0 | 16.0 | 0.80 ± 0.00 | 1 |",
        "| `rd exponential 0.4` | 0.400 | 0.020 | 33.0 | 12.5 | 0.62 ± 0.02 | 0.78 ± 0.03 |",
    ]
