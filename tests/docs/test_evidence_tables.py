"""Tables of what nano shows, from verdicts that are made up."""

from __future__ import annotations

from typing import Any

from benchmarks import evidence_tables


def tallies(**some: tuple[int, int]) -> dict[str, Any]:
    asked = dict.fromkeys(evidence_tables.ROWS, (0, 0)) | some
    return {
        name: {"right": right, "asked": count, "interval": [0.784, 0.937]}
        for name, (right, count) in asked.items()
    }


SIZE = {"height": 128, "width": 192, "frames": 81}


def test_an_aspect_has_its_count_interval_and_judge() -> None:
    seen = tallies(texture=(45, 51), view=(20, 30), colour=(64, 64))
    true = tallies(texture=(50, 50), view=(26, 30), colour=(64, 64))
    text = evidence_tables.evidence([SIZE | {"tallies": seen, "judge_of_truth": {"tallies": true}}])
    assert "| | 128×192×81 |" in text
    assert "| texture | **88%** of 51, 78–94% (judge 100%) |" in text
    # what the judge cannot read is not told, and what nobody asked is not counted
    assert "| camera | not readable (judge 87%) |" in text
    assert "| light | not asked |" in text


def test_the_judges_own_table() -> None:
    result = {
        "machine": {"device": "a CPU, 2 threads"}, "films": 64, "date": "2026-11-16",
        "sizes": [SIZE | {"seconds": 21.3, "tallies": tallies(view=(34, 35))}],
        "returned": SIZE | {"films": 12, "tallies": tallies(view=(7, 8))},
    }  # fmt: skip
    text = evidence_tables.judge(result)
    assert "| camera | 34 of 35 | 7 of 8 |" in text
    assert "21 seconds for all" in text
    assert "12 films" in text
