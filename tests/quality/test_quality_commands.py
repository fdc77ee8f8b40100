"""`jali evaluate` and `jali export` as people and programs call them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import typer
from made_clips import disc, noisy
from test_evaluation import folder_of, run_of
from torch import Tensor
from typer.testing import CliRunner, Result

from jali.cli.evaluate import evaluate
from jali.cli.export import export
from jali.clips.clip import read_clip

app = typer.Typer(pretty_exceptions_enable=False)
app.command("evaluate")(evaluate)
app.command("export")(export)


def jali(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(code: int, match: str, *arguments: object) -> None:
    result = jali(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("jali: ")
    assert result.stderr.count("\n") == 1
    assert match in result.stderr


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    clips = {name: disc(4, 48, 64, seed) for seed, name in enumerate(("a", "b", "c"))}
    generated = {name: noisy(frames, 20) for name, frames in clips.items()}
    return run_of(tmp_path / "dense", clips), run_of(tmp_path / "sparse", generated)


def test_a_table_for_people(places: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    result = jali("evaluate", "--reference", places[0], "--generated", places[1], "--output",
                  output, "--metrics", "psnr,SSIM,ms-ssim,flicker")  # fmt: skip
    assert result.exit_code == 0, result.output
    for words in ("PSNR, dB ↑", "95 % interval", "mean", "n/a", "none", "Written:"):
        assert words in result.stdout
    assert "ms_ssim: n/a: needs sides of at least 176 pixels" in result.stdout
    written = json.loads(output.read_text())
    assert written["kind"] == "jali-metrics"
    assert len(written["pairs"][0]["psnr"]["per_frame"]) == 4


def test_json_for_programs(places: tuple[Path, Path]) -> None:
    result = jali("evaluate", "--reference", places[0], "--generated", places[1],
                  "--metrics", "psnr", "--json")  # fmt: skip
    found = json.loads(result.stdout)
    assert found["summary"]["psnr"]["n"] == 3
    assert found["pairs"][0]["psnr"].keys() == {"mean", "identical"}


def test_faults_show_in_the_table(tmp_path: Path) -> None:
    clean = disc(4, 48, 64)
    folder_of(tmp_path / "a", {"x": clean})
    folder_of(tmp_path / "b", {"x": torch.zeros_like(clean)})
    result = jali("evaluate", "--reference", tmp_path / "a", "--generated", tmp_path / "b",
                  "--metrics", "psnr")  # fmt: skip
    assert "4 black, 3 frozen" in result.stdout


def test_bad_input_is_one_sentence_and_nothing_is_lost(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    dense, sparse = places
    both = ("--reference", dense, "--generated", sparse, "--metrics", "psnr")
    refused(2, "needs both --reference and --generated", "evaluate", "--reference", dense)
    refused(2, "does not exist", "evaluate", "--reference", dense, "--generated", tmp_path / "no")
    refused(2, "metrics are psnr", "evaluate", *both[:4], "--metrics", "fvd")
    (tmp_path / "notes.txt").write_text("notes")
    refused(2, "is not a file of metrics", "evaluate", *both, "--output", tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "notes"
    refused(1, "cannot be made", "evaluate", *both, "--output", tmp_path / "notes.txt" / "m.json")
    old = tmp_path / "metrics.json"
    assert jali("evaluate", *both, "--output", old).exit_code == 0
    before = old.read_text()
    (sparse / "b.mkv").write_bytes((sparse / "b.mkv").read_bytes()[:2000])
    refused(2, "b.mkv", "evaluate", *both, "--output", old)
    assert old.read_text() == before


@pytest.mark.usefixtures("fetched")
def test_fetching_weights_alone() -> None:
    result = jali("evaluate", "--fetch-weights")
    assert result.exit_code == 0
    assert "lpips-alex.safetensors" in result.stdout
    assert "lpips-vgg.safetensors" in result.stdout


def test_export_writes_what_is_missing(tmp_path: Path, frames: Tensor) -> None:
    folder = folder_of(tmp_path / "tensors", {"a": frames, "b": noisy(frames, 5)})
    result = jali("export", folder, "--fps", 16)
    assert result.exit_code == 0, result.output
    assert read_clip(folder / "a.mp4").frames.shape == frames.shape
    assert read_clip(folder / "a.mp4").fps == 16
    before = (folder / "a.mp4").stat().st_mtime_ns
    (folder / "b.mp4").unlink()
    found = json.loads(jali("export", folder, "--json").stdout)
    assert found["written"] == [str(folder / "b.mp4")]
    assert found["skipped"] == {str(folder / "a.mp4"): "exists (--overwrite replaces it)"}
    assert (folder / "a.mp4").stat().st_mtime_ns == before
    assert read_clip(folder / "b.mp4").fps == 24
    assert jali("export", folder, "--overwrite").exit_code == 0
    assert (folder / "a.mp4").stat().st_mtime_ns != before


def test_export_of_a_run_uses_its_lossless_files_and_speed(places: tuple[Path, Path]) -> None:
    dense = places[0]
    (dense / "a.mp4").unlink()
    result = jali("export", dense, "--json")
    assert json.loads(result.stdout)["written"] == [str(dense / "a.mp4")]
    assert read_clip(dense / "a.mp4").fps == 12


def test_export_elsewhere_and_of_single_clips(tmp_path: Path, frames: Tensor) -> None:
    from test_clip import write_png

    (tmp_path / "frames").mkdir()
    for index, frame in enumerate(frames):
        write_png(tmp_path / "frames" / f"{index}.png", frame)
    assert jali("export", tmp_path / "frames").exit_code == 0
    assert read_clip(tmp_path / "frames.mp4").frames.shape == frames.shape
    assert jali("export", tmp_path / "frames", "--output-dir", tmp_path / "x" / "y").exit_code == 0
    assert (tmp_path / "x" / "y" / "frames.mp4").exists()


def test_export_clears_away_what_a_killed_one_left(tmp_path: Path, frames: Tensor) -> None:
    folder = folder_of(tmp_path / "tensors", {"a": frames, "b": frames})
    assert jali("export", folder).exit_code == 0
    (folder / "b.mp4").unlink()
    before = os.umask(0o027)
    try:
        for name in ("a", "b"):  # one will be skipped, one written
            (folder / f".{name}.mp4.01234567.part").write_bytes(b"half")
        assert jali("export", folder).exit_code == 0
    finally:
        os.umask(before)
    assert sorted(p.suffix for p in folder.iterdir()) == [".mp4", ".mp4", ".pt", ".pt"]
    assert (folder / "b.mp4").stat().st_mode & 0o777 == 0o640


def test_export_never_encodes_a_clip_over_itself(places: tuple[Path, Path]) -> None:
    dense = places[0]
    (dense / "manifest.json").unlink()
    for file in dense.glob("*.mkv"):
        file.unlink()
    before = (dense / "a.mp4").read_bytes()
    found = json.loads(jali("export", dense, "--overwrite", "--json").stdout)
    assert found["written"] == []
    assert (dense / "a.mp4").read_bytes() == before


def test_export_says_where_nan_was(tmp_path: Path, frames: Tensor) -> None:
    values = frames / 255
    values[2, 0, 0, 0] = torch.nan
    folder_of(tmp_path / "t", {"a": values})
    result = jali("export", tmp_path / "t")
    assert result.exit_code == 0
    assert "1 frames held NaN" in result.stderr


def test_export_refuses_in_one_sentence(tmp_path: Path, frames: Tensor) -> None:
    refused(2, "does not exist", "export", tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    refused(2, "holds no clips", "export", tmp_path / "empty")
    folder = folder_of(tmp_path / "t", {"a": frames})
    refused(2, "--fps must be above 0", "export", folder, "--fps", 0)
    (folder / "a.pt").write_bytes(b"nothing")
    refused(2, "a.pt cannot be read as a tensor", "export", folder)
    assert os.listdir(folder) == ["a.pt"]


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_help_has_examples(command: str) -> None:
    assert f"jali {command}" in jali(command, "--help").stdout
