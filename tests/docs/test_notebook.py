"""The notebook runs from the first cell to the last, and notebook.md is what it showed.

The page's own code is the notebook's, so that nobody else runs it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import generate_notebook

LARGEST = 1_000_000  # bytes of the notebook, its page and its pictures together
OWN = "own"  # the cell of the method


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    return generate_notebook.read()["cells"]


def source(cells: list[dict[str, Any]], name: str) -> str:
    return next("".join(cell["source"]) for cell in cells if cell["id"] == name)


def test_the_page_is_what_the_notebook_showed() -> None:
    assert generate_notebook.differences() == []


def test_a_difference_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate_notebook, "ASSETS", tmp_path)
    (tmp_path / "notebook-old.png").write_bytes(b"")
    found = generate_notebook.differences()
    assert {"notebook-dense.png", "notebook-old.png"} <= set(found)
    assert generate_notebook.main(check=True) == 1


def test_it_is_a_notebook_of_plain_python(cells: list[dict[str, Any]]) -> None:
    told = generate_notebook.read()
    assert (told["nbformat"], told["nbformat_minor"]) == (4, 5)
    assert set(told["metadata"]) == {"kernelspec", "language_info"}
    names = [cell["id"] for cell in cells]
    assert len(set(names)) == len(names)
    kinds = {"markdown": set(), "code": {"execution_count", "outputs"}}
    for cell in cells:
        common = {"cell_type", "id", "metadata", "source"}
        assert set(cell) == common | kinds[cell["cell_type"]], cell["id"]
        assert re.fullmatch(r"[a-z-]+", cell["id"])
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")  # no magics
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))  # as it ran, in one go


def test_what_is_committed_is_small_and_names_no_machine(cells: list[dict[str, Any]]) -> None:
    pictures = [*generate_notebook.ASSETS.glob("notebook-*")]
    files = [generate_notebook.NOTEBOOK, generate_notebook.PAGE, *pictures]
    assert sum(path.stat().st_size for path in files) < LARGEST
    for cell in cells:
        for output in cell.get("outputs", ()):
            shown = {k: v for k, v in output.get("data", {}).items() if k != "image/png"}
            text = json.dumps([output.get("text"), shown])
            assert not re.search(r"/(home|work|tmp|usr|root|opt|Users)/|0x[0-9a-f]{6}", text)


def test_it_runs_and_shows_what_is_committed(cells: list[dict[str, Any]]) -> None:
    """Every cell, with the real nano: outputs of the same kind, and findings that are the same."""
    pytest.importorskip("matplotlib")
    committed = [[_kind(o) for o in cell.get("outputs", ())] for cell in cells]
    ran = json.loads(json.dumps(cells))
    names = generate_notebook.execute(ran)
    assert [[_kind(o) for o in cell.get("outputs", ())] for cell in ran] == committed
    assert names["dense"].shape == (17, 128, 128, 3)
    found = names["found"]
    assert set(found) == {"entropy", "rd", "random", "local", "mean_query"}
    for total, _, _ in found.values():
        assert total == pytest.approx(0.4, abs=0.01)  # a comparison at equal work
    controls = {"random", "local"}
    best = max(found[name][2] for name in controls)
    assert all(found[name][2] > best + 1 for name in set(found) - controls)  # dB


def _kind(output: dict[str, Any]) -> tuple[str, ...]:
    return (output["output_type"], *sorted(output.get("data", ())))


def test_its_method_takes_thirty_lines(cells: list[dict[str, Any]]) -> None:
    text = source(cells, OWN)
    assert len(text[: text.index("\ncompare(")].strip().splitlines()) <= 30


def test_its_method_keeps_the_contract(cells: list[dict[str, Any]], tmp_path: Path) -> None:
    """What holds for every method of the package, on every backend that runs here."""
    text = source(cells, OWN)
    text = text[: text.index("\ncompare(")]
    register = f'{text}\nfrom jali.methods import METHODS\nMETHODS["mean_query"] = MeanQuery\n'
    (tmp_path / "register_mean_query.py").write_text(register, encoding="utf-8")
    rules = [f"tests/contract/test_{name}.py" for name in ("invariants", "numberless")]
    plugin = ("-p", "register_mean_query", "-p", "no:cacheprovider")
    chosen = ("-k", "mean_query", "-m", "not gpu and not slow")
    command = [sys.executable, "-m", "pytest", "-q", *plugin, *chosen, *rules]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=_with_path(tmp_path)
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 20


def _with_path(folder: Path) -> dict[str, str]:
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
