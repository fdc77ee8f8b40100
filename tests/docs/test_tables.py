"""Columns say which error they hold: what skipping does, or what a kernel rounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_table_shows_what_skipping_does() -> None:
    """Beside every speed-up stands what the clips of the model that was looked at have left."""
    told = json.loads((ROOT / "benchmarks/results/quality-totals.json").read_text())
    measured = {
        (row["method"], row["schedule"] == "esa", row["total"], round(row["psnr"], 1))
        for row in told["rows"]
        if row["steps"] == 30
    }
    page = (ROOT / "README.md").read_text()
    table = page.split("<!-- table:first -->")[1].split("<!-- /table:first -->")[0]
    assert "a forecast" in table
    rows = re.findall(r"^\| ([\d.]+), `(\w+)`(.*?) \| ([\d.]+) dB \| ", table, re.M)
    assert len(rows) == len(re.findall(r"^\| [\d.]+, ", table, re.M)) >= 9
    assert table.count("×**") >= 12
    for total, method, more, psnr in rows:
        spec = method + (":probes=0" if "no probes" in more else "")
        assert (spec, "ESA" in more, float(total), float(psnr)) in measured


def test_no_column_is_just_called_error() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        generated = "".join(re.findall(r"<!-- table:.*?<!-- /table:", page.read_text(), re.S))
        assert "| error |" not in generated, page
