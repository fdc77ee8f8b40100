"""`jali arena` and `jali methods`, as people call them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jali.cli.methods import describe
from jali.methods import METHODS

Jali = Callable[..., Any]
ROWS = ("--methods", "entropy:q_block=8,k_block=2 random:q_block=8,k_block=2 "
        "local:q_block=8,k_block=2", "--num-prompts=1")  # fmt: skip


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JALI_WEIGHTS", str(tmp_path))  # no LPIPS: it takes longer than all


def test_a_leaderboard_in_the_terminal_and_in_files(
    jali: Jali, small: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("av")
    pytest.importorskip("jinja2")
    folder = tmp_path / "arena"
    done = jali("arena", *small, *ROWS, "--totals=0.71", "--output", folder)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "0.71 of all work, exponential, 1 prompt " in said
    assert "1 prompt cannot tell rows apart: it takes 3" in said
    assert "LPIPS (Alex) was not measured" in said
    assert {"arena.json", "arena.html", "runs"} <= {path.name for path in folder.iterdir()}
    # Once more, for machines: nothing is made again.
    done = jali("arena", *small, *ROWS, "--totals=0.71", "--output", folder, "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["complete"]
    (board,) = told["boards"]
    assert {row["method"].partition(":")[0] for row in board["rows"]} == {
        "entropy", "random", "local",
    }  # fmt: skip
    # The benchmark of pipelines is the same arena where it is asked for totals.
    done = jali(
        "bench", "pipeline", *small, *ROWS, "--totals=0.71", "--output-dir", folder, "--json"
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == told


def test_every_method_is_listed_with_what_it_does_and_reads(jali: Jali) -> None:
    said = " ".join(jali("methods").stdout.split())
    for name, kind in METHODS.items():
        one = describe(kind)
        assert f" {name} " in said
        assert one["what"].split()[0] in said
        assert one["what"][0].isupper()
        assert not one["what"].endswith(".")
    found = {one["name"]: one for one in json.loads(jali("methods", "--json").stdout)}
    assert list(found) == list(METHODS)
    assert found["entropy"]["reads"] == "q, k"
    assert found["rd"]["reads"].startswith("q, k, v")
    assert found["random"]["reads"] == "nothing"
    assert found["random"]["control"]
    assert found["sol"]["budget"] == "found for what is asked"
    assert found["entropy"]["options"]["samples"] == "4"
    assert "samples = 4" in jali("methods", "entropy").stdout
