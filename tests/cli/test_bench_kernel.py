"""`jali bench kernel`: what is asked is measured, and what cannot run says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Jali = Callable[..., Any]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_a_cpu(jali: Jali, tmp_path: Path) -> None:
    words = ("--shapes=tiny", "--densities=0.5", "--inputs=gaussian", "--repeats=1",
             "--backends=torch,triton", "--output", tmp_path / "k.json", "--json")  # fmt: skip
    done = jali("bench", "kernel", *words)
    assert done.exit_code == 0, done.stderr
    rows = {row["backend"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["torch"]["cost"] == pytest.approx(0.5, abs=0.1)
    assert rows["torch"]["error"] < 1e-4
    assert "CUDA" in rows["triton"]["why_not"]
    assert json.loads((tmp_path / "k.json").read_text())["what"] == "jali bench kernel"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--shapes=tini", "unknown shape 'tini'; did you mean 'tiny'?"),
        ("--backends=fa9", "unknown backend 'fa9'"),
        ("--densities=0.5,0", "budgets are numbers in (0, 1], got '0.5,0'"),
        ("--methods=psa-coarse", "unknown method 'psa-coarse'"),
        ("--shapes=,", "name at least one shape"),
    ],
)
def test_bad_input(words: str, sentence: str, jali: Jali) -> None:
    done = jali("bench", "kernel", words)
    assert done.exit_code == 2
    assert done.stderr.startswith("jali: ")
    assert sentence in done.stderr
