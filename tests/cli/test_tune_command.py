"""`jali tune` and `--recipe`, as people call them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jali import Recipe

Jali = Callable[..., Any]


def test_a_recipe_is_made_told_and_used(
    jali: Jali, small: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("av", "jinja2"):
        pytest.importorskip(package)
    monkeypatch.setenv("JALI_WEIGHTS", str(tmp_path))  # no LPIPS: it takes longer than all
    # So small a model is no faster: its clips are said to be.
    monkeypatch.setattr(
        "jali.evaluation.tuning.trial.speed_ups", lambda _, records, *__: [[2.0]] * len(records)
    )
    output = tmp_path / "r.yaml"
    asked = ("tune", *small, "--method=entropy:q_block=8,k_block=2", "--target-psnr=30",
             "--prompt=a red ball", "--prompt=a blue cube", "--output", output)  # fmt: skip
    done = jali(*asked)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "wan-t2v-1.3b, asked for 30 dB: entropy at a total of 0.05 (exponential)." in said
    assert "On 1 held-out clip: " in said
    assert f"use it: jali generate --model wan-t2v-1.3b --recipe {output}" in said
    assert (tmp_path / "r-tuning" / "tuning.html").is_file()
    # Once more, for machines.
    done = jali(*asked, "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["method"], told["curve"]["total"], told["met"]) == ("entropy", 0.05, True)
    # Clips by it, of its size and steps.
    monkeypatch.undo()
    model, path = small[:2]
    run = tmp_path / "run"
    done = jali("generate", model, path, "--device=cpu", "--argument=max_sequence_length=16",
                "--prompt=a dog", "--recipe", output, "--output-dir", run, "--json")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    settings = json.loads(done.stdout)["settings"]
    assert (settings["total"], settings["steps"], settings["height"]) == (0.05, 3, 64)
    # A file that is none.
    bad = tmp_path / "bad.yaml"
    bad.write_text(Recipe.read(output).text().replace("total: 0.05", "total: .nan"))
    done = jali("generate", model, path, "--recipe", bad)
    assert done.exit_code == 2
    assert "bad.yaml is no recipe that can be used: recipe.curve" in done.stderr
    done = jali("generate", "--model=nano", "--recipe", output)
    assert done.exit_code == 2
    assert "--recipe" in done.stderr
    assert "is of the model wan-t2v-1.3b, and this is nano" in done.stderr
