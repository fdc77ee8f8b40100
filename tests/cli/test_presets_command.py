"""`jali presets`: all of them, one of them, those of a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jali.presets import load_preset, presets
from jali.presets.method import read_method

Jali = Callable[..., Any]


def test_all_of_them(jali: Jali) -> None:
    told = json.loads(jali("presets", "--json").stdout)
    assert len(told) == len(presets())
    text = jali("presets").stdout
    for preset in presets():
        assert preset.name in text
        assert str(preset.model) in text
    own = json.loads(jali("presets", "--model", "Wan2.1_1.3b", "--json").stdout)
    assert {preset["model"] for preset in own} == {"wan-t2v-1.3b"}


def test_one_in_full(jali: Jali) -> None:
    told = json.loads(jali("presets", "psa_balanced", "--model", "cogvideo_5b", "--json").stdout)
    expected = load_preset("psa_balanced", "cogvideox-5b")
    assert (
        read_method({k: told[k] for k in ("method", "options", "schedule")}, "x") == expected.method
    )
    text = jali("presets", "psa-balanced", "--model", "cogvideox-5b").stdout
    assert "dense_steps: 15" in text
    assert "mask_ratios" in text


def test_those_of_a_file(jali: Jali, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("presets:\n  mine:\n    method: rf_v2\n    options: {sparsity: 0.6}\n")
    (one,) = json.loads(jali("presets", "--config", file, "--json").stdout)
    assert (one["name"], one["options"]["sparsity"]) == ("mine", 0.6)
    assert "rf_v2" in jali("presets", "mine", "--config", file).stdout


def test_what_is_not_there(jali: Jali, tmp_path: Path) -> None:
    for words, expected in (
        (("psa_fast",), "unknown preset 'psa_fast'"),
        (("psa_balanced",), "differs between models"),
        (("--model", "sora"), "no presets for the model 'sora'"),
        (("--config", tmp_path / "none.yaml"), "no preset file"),
    ):
        done = jali("presets", *words)
        assert done.exit_code == 2
        assert done.stderr.startswith("jali: ")
        assert expected in done.stderr
        assert not done.stdout
