"""Tables of quality per total work show the rows that there are, and say nothing of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality_tables
from benchmarks.row_spec import read_rows

CLIPS = (-1.0, 0.0, 0.25, 0.75)  # of four clips against their mean


def result(*lines: str, off: float = 0.0) -> dict[str, Any]:
    """A file of results in which PSNR is 40 dB times the total, more for some methods."""
    bonus = {"rd": 6.0, "entropy": 4.0, "psa": 1.5, "random": 0.0, "local": -1.0, "cached": 3.0}
    rows = []
    for spec in read_rows(lines):
        if spec.schedule == "esa" and spec.total < 0.4:
            rows.append(spec.key | {"unreachable": "cannot be reached"})
            continue
        psnr = 40 * spec.total + bonus[spec.name] - 3 * (spec.schedule == "esa")
        rows.append(
            spec.key
            | {
                "achieved": spec.total + off, "planning": 0.016, "seconds": 2.0, "lpips": 0.01,
                "psnr": psnr, "ssim": 0.9, "backends": ["triton"], "judge": JUDGE,
                "clips": {"psnr": [psnr + apart * bonus[spec.name] for apart in CLIPS]},
            }
        )  # fmt: skip
    dense = {"seconds": 1.0, "judge": JUDGE, "by_jali": {"psnr": 100.0}}
    return {
        "machine": {"device": "H200"}, "size": {"height": 192, "width": 320, "num_frames": 37},
        "tokens": 9600, "world": "first", "guidance": 4.0, "dtype": "bfloat16", "rows": rows,
        "date": "2026-11-16", "prompts": ["a", "b", "c", "d"], "dense": {"12": dense},
    }  # fmt: skip


JUDGE = {"colour": 1.0, "shape": 0.75, "motion": 1.0, "no_more": 0.5, "no_less": 1.0}
ALL = [f"{m} exponential,esa .54,.4,.3 12" for m in ("rd", "entropy", "psa", "random", "local")]
FULL = [line.replace("exponential,esa", s) for line in ALL for s in ("exponential", "esa")]


def test_a_full_file_makes_every_table() -> None:
    told = result(*FULL)
    page = quality_tables.page(told, "assets/x.svg")
    assert "bit for bit" in page
    assert "](assets/x.svg)" in page
    # rd at 0.4: 16 + 6 dB, and 2 dB before entropy. The clips differ by 2 + 2 × CLIPS, so the
    # interval is t(3) · sqrt(6.5 / 3 / 4) = 3.18 · 0.736.
    assert "| 12 | 0.40 | `rd`, exp | 0.416 | 22.00 | `entropy`, exp | 0.416 | 20.00 |" in page
    assert "| `rd` | **27.6 exp** (+2.0 ± 2.3) |" in page
    assert "| `psa` | 23.1 exp (-4.5 ± 5.3) |" in page
    assert "| `entropy` | esa | 22.6 | 17.0 | – |" in page
    assert "| `entropy` | exponential | **25.6** | **20.0** | **16.0** |" in page
    assert "0.400 + 0.016 = 0.416: 22.0 dB" in page
    assert "| 12 | dense | 1 | 100% | 75% | 100% | 50% | 100% |" in page


def test_planning_is_paid_by_more_of_the_others_total() -> None:
    told = result(*FULL)
    for row in told["rows"]:
        row["planning"] = 0.05 if row["method"] == "rd" else 0.0
    # rd at 0.4 has 22 dB for 0.45 in all; entropy would have 40 · 0.45 + 4 there.
    assert "| +2.0 ± 2.3 | +0.0 |" in quality_tables.page(told)
    # At 0.54 nobody else has as much work.
    assert "| 25.60 | +2.0 ± 2.3 |  |" in quality_tables.page(told)


def test_the_reading_says_what_the_rows_say() -> None:
    told = quality_tables.reading(result(*FULL))
    assert "20.0 instead of 17.0 dB at 0.40 (+3.0 ± 0.0)" in told
    assert "+2.0 ± 2.3 dB at 0.40 (`entropy`, which may be chance)" in told
    assert "**Every method beats both controls** at every total measured in 12 steps." in told
    said = quality_tables.sentence(result(*FULL))
    assert said is not None
    assert "0.4 of all attention work gives 17.0 dB" in said
    assert "`entropy` has 20.0 and `rd` 22.0; planning takes another 0.016 and 0.016." in said
    assert "by lot or by nearness have 16.0 and 15.0" in said


def test_what_was_not_measured_is_not_spoken_of() -> None:
    told = result("entropy exponential .4 12", "psa esa .3 12")
    page = quality_tables.page(told)
    assert "rd" not in page.replace("world", "")
    assert "0.54" not in page
    assert "![" not in page
    assert "| `entropy` | 20.0 exp |" in page
    assert "psa" not in page.replace("`psa`", "")
    assert quality_tables.reading(told) == ""
    assert quality_tables.sentence(told) is None
    assert "| 12 | `entropy` | exponential | 0.40 | 0.400 | 0.016 | 20.00 |" in (
        quality_tables.rows_section(told) or ""
    )


def test_a_file_without_rows_is_no_mistake() -> None:
    told = result() | {"dense": {}}
    assert "|" not in quality_tables.page(told)
    assert quality_tables.reading(told) == ""
    assert quality_tables.rows_section(told) is None


def test_more_work_than_asked_is_told_and_never_best() -> None:
    told = result("entropy exponential .4 12")
    told["rows"] += result("rd exponential .4 12", off=0.03)["rows"]
    page = quality_tables.page(told)
    assert "| `rd` | 22.0 exp (+2.0 ± 2.3) at 0.430 |" in page
    assert "| `entropy` | 20.0 exp (-2.0 ± 2.3) |" in page
    assert quality_tables.reading(told) == ""


def test_a_method_behind_a_control_is_in_italics() -> None:
    told = result(*FULL)
    for row in told["rows"]:
        if row["method"] == "psa" and row["total"] == 0.3 and "psnr" in row:
            row["psnr"] = 11.5
    assert "*11.5 exp*" in quality_tables.page(told)
    assert "**Behind a control** in 12 steps: `psa` at 0.30." in quality_tables.reading(told)


def test_the_picture_has_a_line_for_each_method_and_one_for_the_old_schedule() -> None:
    from docs.nano_pictures import totals

    told = result(*FULL, "rd exponential .4 30", "rd:samples=4 exponential .4 30")
    twelve, thirty = totals(told).axes
    of = {line.get_label(): line for line in twelve.lines}
    assert list(of) == ["rd", "entropy", "psa", "random", "local", "entropy, ESA's schedule"]
    assert [line.get_label() for line in thirty.lines] == ["rd"]
    work, psnr = of["entropy, ESA's schedule"].get_data()
    assert list(work) == pytest.approx([0.556, 0.416])  # planning included
    assert list(psnr) == pytest.approx([22.6, 17.0])


def test_settings_of_rd_are_told_apart_from_rd() -> None:
    told = result("rd exponential .4 12", "rd:samples=128 exponential .4 12", "psa esa .4 12")
    for row in told["rows"]:
        if row["method"] == "rd:samples=128":
            row["psnr"] = 40.0
    page = quality_tables.page(told)
    assert "| 12 | 0.40 | `rd`, exp |" in page  # as it comes, however good another setting is
    assert "| `rd:samples=128` |" not in page
    assert "| 12 | 0.40 | exp | `rd` | `samples=128` | 0.016 | 40.00 |" in page


def test_the_pages_are_made_from_the_file_of_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(quality_tables.__file__).parent))
    from benchmarks import tables

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    names = ("nano-quality", "nano-reading", "nano-sentence", "nano-rows")
    made: dict[str, Callable[[], str | None]] = {name: tables.TABLES[name] for name in names}
    assert [made[name]() for name in names] == [None] * 4
    (tmp_path / "quality-totals.json").write_text(json.dumps(result(*FULL)), encoding="utf-8")
    assert None not in [made[name]() for name in names]


def test_a_book_of_rd_is_no_other_method_than_rd() -> None:
    told = result("rd exponential .4 12", "cached:of=rd exponential .4 12", "psa esa .4 12")
    for row in told["rows"]:
        row["psnr"] = {"rd": 30.0, "psa": 20.0}.get(row["method"], 25.0)
    page = quality_tables.page(told)
    assert "| 12 | 0.40 | `rd`, exp | 0.416 | 30.00 | `psa`, ESA |" in page
    assert "| `cached`, a book of rd | 25.0 exp (" in page  # better than psa, but not the best


@pytest.mark.parametrize(("lpips", "says"), [(0.01, "agree on which"), (0.2, "LPIPS at 0.40;")])
def test_metrics_that_disagree_are_named(lpips: float, says: str) -> None:
    told = result("rd exponential .4 12", "psa esa .4 12")
    for row, psnr, far in zip(told["rows"], (30.0, 20.0), (lpips, 0.1), strict=True):
        row |= {"psnr": psnr, "ssim": psnr / 40, "lpips": far}
    assert says in quality_tables.reading(told)
