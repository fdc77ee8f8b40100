"""Flags of ESA and PSA become jali's; what has no effect is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jali.cli.old_names import translate

Jali = Callable[..., Any]
KNOWN = ("--method", "--preset", "--prompts", "--steps", "--lora", "--output-dir", "--num-frames")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--use_psa", "--method psa"),
        ("--attention_preset psa_balanced", "--preset psa_balanced"),
        ("--attention_preset=psa_balanced", "--preset=psa_balanced"),
        ("--prompt_file p.txt --num_inference_steps 4", "--prompts p.txt --steps 4"),
        ("--output_dir out --num_frames=9", "--output-dir out --num-frames=9"),
        ("--lora_path x.safetensors", "--lora x.safetensors"),
        ("--method psa -- --use_psa", "--method psa -- --use_psa"),
        ("--no_such", "--no_such"),
    ],
)
def test_old_flags(old: str, new: str) -> None:
    assert translate(old.split(), KNOWN) == new.split()


def test_flags_without_an_effect_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert translate(["--no_warmup", "--batch_size", "2", "--steps", "4"], KNOWN) == [
        "--steps",
        "4",
    ]
    said = capsys.readouterr().err
    assert "--no_warmup has no effect: nothing is generated before the timed run" in said
    assert "--batch_size has no effect" in said


def test_old_flags_are_not_in_the_help(jali: Jali) -> None:
    text = jali("generate", "--help").stdout
    assert "use_psa" not in text
    assert "attention_preset" not in text


def test_a_psa_command_line(jali: Jali, small: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("av")
    rest = [word for word in small if not word.startswith(("--model", "--num-frames", "--steps"))]
    done = jali(
        "generate", "--model=Wan2.1_1.3b", *rest, "--num_frames=9", "--num_inference_steps=3",
        "--prompt", "a cat", "--use_psa", "--attention_preset", "psa_balanced", "--no_warmup",
        "--output_dir", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    settings = json.loads(done.stdout)["settings"]
    assert (settings["model"], settings["method"]) == ("wan-t2v-1.3b", "psa")
    assert settings["preset"] == "psa_balanced"
