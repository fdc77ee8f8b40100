"""Columns say which error they hold: what skipping does, or what a kernel rounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_first_table_shows_what_skipping_does() -> None:
    """Not the rounding of a kernel, which is a hundred times smaller and looks like a loss."""
    result = json.loads((ROOT / "benchmarks/results/wan-h200.json").read_text())
    measured = {(r["tokens"], r["method"]): r.get("error") for r in result["rows"] if "error" in r}
    page = (ROOT / "README.md").read_text()
    table = page.split("<!-- table:first -->")[1].split("<!-- /table:first -->")[0]
    assert "| error against dense |" in table
    rows = re.findall(r"\(([\d,]+) tokens\) \| (.*?) \|.*\| ([\d.]+)% \|", table)
    assert len(rows) >= 6
    for tokens, method, shown in rows:
        error = measured[int(tokens.replace(",", "")), method]
        assert float(shown) == round(100 * error, 1)


def test_no_column_is_just_called_error() -> None:
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        generated = "".join(re.findall(r"<!-- table:.*?<!-- /table:", page.read_text(), re.S))
        assert "| error |" not in generated, page
