"""Numbers that stand in the text, not in a generated table, are those of a result file too."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import quality_tables

ROOT = Path(__file__).parents[2]
TOTALS = ROOT / "benchmarks/results/quality-totals.json"


def test_the_readme_says_what_was_measured_on_nano() -> None:
    said = quality_tables.sentence(json.loads(TOTALS.read_text("utf-8")))
    assert said is not None
    assert said in (ROOT / "README.md").read_text("utf-8")


def test_the_readme_begins_with_what_is_gained() -> None:
    """A measured gain, one example, one picture; words of this library's own come after it."""
    text = (ROOT / "README.md").read_text("utf-8")
    before = text[: text.index("## ")]
    first, example, picture = (before.index(mark) for mark in ("table:gain", "```python", "!["))
    assert first < example < picture
    for word in ("plan", "site", "cost", "budget", "backend"):
        assert not re.search(rf"\b{word}s?\b", before), word
    assert "measured" in before[:example]
    assert re.search(r"\d\.\d×", before[:example])


def test_the_caption_of_the_film_says_what_other_clips_have() -> None:
    told = json.loads(TOTALS.read_text("utf-8"))
    at = {"method": "entropy", "schedule": "exponential", "total": 0.4, "steps": 12}
    (row,) = quality_tables.Results(told).some(**at)
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    mean = f"{len(told['prompts'])} that were not chosen have {row['psnr']:.1f} dB"
    assert f"{mean} on average in 12." in text
