"""What the benchmark of tuning keeps of a row, and that its tables say no more than that."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import tune_tables


def row(**changes: Any) -> dict[str, Any]:
    psnr = {"mean": 35.2, "low": 33.0, "high": 37.4, "next_low": 29.0, "next_high": 41.4}
    found = {
        "method": "rd", "target": 35.0, "seconds": 71.6, "cut": False,
        "deciding": {"psnr": 35.31, "points": []},
        "recipe": {"curve": {"total": 0.33}, "measured": {"metrics": {"psnr": psnr}}},
        "inside": {"mean": 34.04, "interval_of_mean": True, "interval_of_mean_of_others": True},
        "others": {"exponential": {"psnr": [33.0, 35.0]}},
        "against": {
            "recipe": {"mean": 0.0, "low": None, "high": None},
            "moved": {"mean": -0.31, "low": -0.51, "high": -0.11},
        },
    }  # fmt: skip
    return found | changes


def told(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": "NVIDIA H200", "size": {"height": 192, "width": 320, "num_frames": 37},
        "steps": 12, "dtype": "bf16", "date": "2026-11-16", "prompts": ["a"] * 16,
        "others": ["b"] * 16, "probes": 14, "rows": list(rows),
    }  # fmt: skip


def test_tables_say_what_the_rows_say() -> None:
    text = tune_tables.page([told(row(), row(method="entropy", dense=True, cut=True))])
    assert text is not None
    assert "8 prompts find, 8 judge, 14 probes; 16 other prompts are seen once." in text
    assert (
        "| `rd` | 35 dB | 0.33 | 35.3 | 35.2 (33.0 to 37.4) | 29.0 to 41.4 | 34.0 | yes | 72 s |"
    ) in text
    assert "| `entropy` | 35 dB | dense | | | | | | 72 s in parts |" in text
    assert "work moved by probes instead | the recipe instead |" in text
    assert "| `rd` | 0.33 | 34.0 dB | −0.31 ± 0.20 dB | +0.00 dB |" in text
    assert "linear" not in text


@pytest.mark.parametrize(("wider", "said"), [(True, "no, but within"), (False, "**no**")])
def test_a_mean_outside_is_told(wider: bool, said: str) -> None:
    outside = {"mean": 32.0, "interval_of_mean": False, "interval_of_mean_of_others": wider}
    assert said in str(tune_tables.page([told(row(inside=outside))]))


def test_nothing_measured_is_no_table() -> None:
    assert tune_tables.page([]) is None
    assert tune_tables.page([told()]) is None


def test_a_forecast_is_arithmetic_on_measured_calls() -> None:
    row = {"part": "forward", "model": "wan-480p", "method": "entropy 0.5"}
    row |= {"dense_ms": 450.0, "ms": 360.0}
    text = tune_tables.forecast([row, {"part": "host"}], probes=12, moves=3)
    assert text is not None
    assert "A forecast, not measured: 8 dense clips, 40 sparse ones" in text
    # 100 calls · (8 · 0.45 + 40 · 0.36) s = 1,800 s, and 60 clips more take 2,160 s.
    assert "| Wan 2.1 1.3B, 480p | 0.45 s | 0.36 s | 0.5 hours | 1.1 hours |" in text
    assert "14B" not in text
    assert tune_tables.forecast([], 12, 3) is None


def test_an_interval_is_checked_against_other_clips() -> None:
    from benchmarks.tune_nano import inside, paired
    from jali.integration.recipe import Measured, Spread

    class Told:
        measured = Measured(8, {"psnr": Spread(35.0, 34.0, 36.0, 31.0, 39.0)}, 0.4)

    near = inside(Told, [36.5] * 8)  # type: ignore[arg-type]
    assert near["interval_of_mean"] is False
    assert near["interval_of_next"] is True
    assert near["half_of_mean_of_others"] == pytest.approx(2**0.5 - 0.0)
    assert near["interval_of_mean_of_others"] is False
    assert inside(Told, [35.5] * 8)["interval_of_mean"] is True  # type: ignore[arg-type]
    assert paired([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])["mean"] == 1
