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
    demo = json.loads((TOTALS.parent / "demo-2cores.json").read_text("utf-8"))
    steps, total = demo["settings"]["steps"], demo["settings"]["total"]
    assert f"this clip has {demo['psnr']:.1f} dB in {steps} steps" in text
    assert f"with {total:g} of all attention work (`{demo['settings']['method']}`)" in text
    assert f"“{demo['prompt']}”" in text


def test_the_page_of_nano_says_what_its_clips_showed() -> None:
    """Of other prompts, and of the model before; the main table is generated."""
    told = json.loads((TOTALS.parent / "nano-evidence.json").read_text("utf-8"))
    text = " ".join((ROOT / "docs/nano.md").read_text("utf-8").split())
    small, wide = (row for row in told["other_prompts"] if row["shift"] == 5)
    assert f"only {small['no_more']:.0%} (128×128) and {wide['no_more']:.0%}" in text.replace(
        " %", "%"
    )
    old, new = (told["first_world"][name][1] for name in ("the model before", "this model"))
    for words in (
        f"{old['no_more']:.0%} had no extra things at 192×320 and {old['shape']:.0%} the right",
        f"where this one has {new['no_more']:.0%} and {new['shape']:.0%}",
        f"({100 * old['no_less']:.0f} against {new['no_less']:.0%})",
    ):
        assert words in text.replace(" %", "%"), words
