"""Flags of ESA and PSA become jali's; what has no effect is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from jali.cli.old_names import translate
from jali.generation import Settings

Jali = Callable[..., Any]
Dry = Callable[[str], tuple[Settings, str]]
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


@pytest.fixture
def dry(jali: Jali, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dry:
    """`jali generate` up to the run: the settings that would run, and what was said before."""
    out = tmp_path / "out"

    def run(line: str) -> tuple[Settings, str]:
        seen: list[Settings] = []

        def stop(runs: dict[Path, Settings], *_: Any) -> None:
            seen.extend(runs.values())
            raise ValueError("stopped here")

        monkeypatch.setattr("jali.generation.produce_runs", stop)
        done = jali("generate", *line.split(), "--prompt=x", "--device=cpu", "--output-dir", out)
        assert "stopped here" in done.stderr, done.stderr
        return seen[0], done.stderr

    return run


PSA_COMMANDS = {
    # model key: preset, dense steps, (height, width, frames), steps, guidance
    "wan21_1.3b": ("psa_balanced", 15, (720, 1280, 69), 50, 5.0),
    "wan21_14b": ("psa_balanced", 15, (720, 1280, 69), 50, 5.0),
    "wan22_5b": ("psa_balanced", 15, (704, 1280, 121), 50, 5.0),
    "wan22_a14b": ("psa_balanced", 12, (768, 1280, 69), 40, 4.0),
    "cogvideo_5b": ("psa_balanced", 15, (480, 720, 49), 50, 6.0),
    "cogvideo1.5_5b": ("psa_balanced", 15, (768, 1360, 81), 50, 6.0),
    "cogvideo_5b_lora": ("psa_4steps", 0, (480, 720, 49), 4, 1.0),
    "Wan2.1_1.3b": ("psa_balanced", 15, (720, 1280, 69), 50, 5.0),
}


@pytest.mark.parametrize("key", PSA_COMMANDS)
def test_use_psa_alone_is_what_psa_runs(dry: Dry, key: str) -> None:
    settings, said = dry(f"--model {key} --use_psa")
    preset, dense, size, steps, guidance = PSA_COMMANDS[key]
    assert (settings.method, settings.preset) == ("psa", preset)
    assert settings.warmup_frac == dense
    assert settings.dense_first_layer is False
    assert (settings.height, settings.width, settings.num_frames) == size
    assert (settings.steps, settings.guidance) == (steps, guidance)
    # What is as there, and what is not, is said before anything runs.
    assert f"--use_psa: preset {preset}, " in said
    assert f"{size[0]}×{size[1]} pixels (height × width), {size[2]} frames, {steps} steps" in said
    assert "the seed is 0, there 42" in said
    assert ("no LoRA is loaded" in said) == (key == "cogvideo_5b_lora")
    assert "nothing will be sparse" not in said


def test_what_is_given_is_not_said_to_differ(dry: Dry) -> None:
    settings, said = dry(
        "--model wan21_1.3b --use_psa --seed 42 --negative_prompt ugly --height 480"
    )
    assert (settings.seed, settings.height, settings.width) == (42, 480, 1280)
    assert "seed" not in said
    assert "negative" not in said


def test_use_psa_with_other_words(dry: Dry) -> None:
    ours, said = dry("--model wan-t2v-1.3b --use_psa")
    assert (ours.preset, ours.warmup_frac, ours.height) == ("psa_balanced", 15, 480)
    assert "PSA's size for wan-t2v-1.3b is 720×1280×69" in said
    other, said = dry("--model nano --use_psa")
    assert (other.preset, other.warmup_frac, other.budget) == ("psa_balanced", 0.3, 0.15)
    assert "nano is no model of PSA's" in said
    named, _ = dry("--model wan21_1.3b --use_psa --attention_preset=psa_topk")
    assert (named.preset, named.budget) == ("psa_topk", 0.1)
    dense, said = dry("--model wan21_1.3b --use_psa --attention_preset baseline")
    assert dense.method == "dense"
    assert "preset baseline, which is dense" in said
    own, _ = dry("--model wan21_1.3b --use_psa --option k_block=32")
    assert (own.method, own.preset, own.options) == ("psa", None, {"k_block": 32})


def test_use_psa_with_another_methods_preset_is_refused(jali: Jali) -> None:
    done = jali("generate", "--model=wan21_1.3b", "--use_psa", "--preset=rf_v2_balanced")
    assert done.exit_code == 2
    assert "of the method rf_v2, but the method asked for is psa" in done.stderr


def test_an_experiment_in_psas_words() -> None:
    """A preset names its method there: the flag must not name it once more."""
    from jali.cli.main import app

    command = typer.main.get_command(app).commands["experiment"].commands["run"]  # type: ignore[attr-defined]
    given = command.make_context("run", ["--model", "wan21_1.3b", "--use_psa", "--tag", "a"]).params
    assert (given["method"], given["preset"]) == (None, "psa_balanced")


def test_psas_names_without_its_flag(dry: Dry) -> None:
    settings, said = dry("--model wan21_1.3b")
    assert settings.method == "rd"
    assert "without --use_psa PSA is dense; here the method is rd" in said
    settings, said = dry("--model wan21_1.3b --attention_preset psa_balanced")
    assert settings.preset == "psa_balanced"
    assert "here the preset runs" in said
    assert "PSA" not in dry("--model wan-t2v-1.3b --preset psa_balanced")[1]


@pytest.mark.parametrize(
    ("line", "dense"),
    [
        ("--model cogvideo_5b_lora --use_psa --attention_preset psa_balanced", "the first 15"),
        ("--model wan22_a14b --use_psa --num_inference_steps 12", "the first 12"),
        ("--model nano --warmup-frac 1.0", "the first 100%"),
    ],
)
def test_a_run_without_a_sparse_step_is_warned_of(
    dry: Dry, caplog: pytest.LogCaptureFixture, line: str, dense: str
) -> None:
    settings, _ = dry(line)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert (
        f"nothing will be sparse: of {settings.steps} steps the schedule keeps {dense}" in warned[0]
    )


def test_a_run_with_one_sparse_step_is_not(dry: Dry, caplog: pytest.LogCaptureFixture) -> None:
    dry("--model wan22_a14b --use_psa --num_inference_steps 13")
    dry("--model nano --method dense --steps 1")
    assert not caplog.records
