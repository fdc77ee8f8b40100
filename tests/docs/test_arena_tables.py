"""Tables of arenas are made from their files alone, and say what the leaderboard says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import arena_tables


def write(folder: Path, steps: int, **more: Any) -> None:
    def record(method: str, psnr: float, **own: Any) -> dict[str, Any]:
        usual = {
            "method": method, "schedule": "exponential", "total": 0.4, "first": 0, "session": 0,
            "achieved": 0.4, "planning": 0.01, "seconds": 2.0, "asked": 0.4,
            "metrics": {"psnr": [psnr, psnr + 2, psnr + 4.1], "ssim": [0.9, 0.91, 0.92]},
        }  # fmt: skip
        return usual | own

    settings = {"model": "nano", "steps": steps, "height": 192, "width": 320, "num_frames": 37}
    told = {
        "kind": "jali-arena", "version": 1, "settings": settings | {"dtype": "bfloat16"},
        "prompts": ["a", "b", "c"], "batch": 3, "machine": {"device": "H200"}, "versions": {},
        "jali": "0.1.0", "date": "2026-11-16",
        "dense": [{"first": 0, "session": 0, "seconds": [4.0, 4.4]}],
        "records": [
            record("rd", 38), record("psa", 30), record("local", 33), record("random", 29),
            record("entropy", 44, achieved=0.5),
            record("sol", 35, schedule="as published", total=None, asked=None, achieved=0.61),
        ],
    }  # fmt: skip
    (folder / f"arena-nano-{steps}.json").write_text(json.dumps(told | more), encoding="utf-8")


def test_every_row_of_every_arena_is_shown(tmp_path: Path) -> None:
    write(tmp_path, 30)
    write(tmp_path, 12)
    text = arena_tables.page(arena_tables.read_all(tmp_path), tmp_path)
    assert text is not None
    assert text.index("**nano, 12 steps**: 3 prompts, 37 frames at 192×320") < text.index(
        "30 steps"
    )
    assert "| `rd` | **40.0 ± 5.1** |" in text
    assert "| `psa` | *32.0 ± 5.1* |" in text
    assert "| `entropy` | 46.0 ± 5.1 at 0.500 |" in text
    assert "| 1 | `rd` | 40.0 ± 5.1 | 0.910 ± 0.025 |  | +5.0 ± 0.0 | 0.400 | 0.010 |" in text
    assert "2.10 2.00 – 2.20" in text
    assert "- At 0.4 (exponential) these lose to the control local: psa (−3.0 ± 0.0 dB)." in text
    assert "|  | `sol` | 37.0 ± 5.1 |" in text
    assert "![" not in text
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "arena-nano-12.svg").write_text("<svg/>")
    text = arena_tables.page(arena_tables.read_all(tmp_path), tmp_path)
    assert text is not None
    assert text.count("![") == 1


def test_without_results_nothing_is_said(tmp_path: Path) -> None:
    assert arena_tables.page(arena_tables.read_all(tmp_path), tmp_path) is None
    write(tmp_path, 12, records=[])
    assert arena_tables.page(arena_tables.read_all(tmp_path), tmp_path) is None
