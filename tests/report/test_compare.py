"""`jali compare`: what it prints, and what it refuses without touching anything."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import example
import pytest
import torch
import typer
from typer.testing import CliRunner

from jali.cli.compare import compare
from jali.clips.clip import read_clip, write_mp4

app = typer.Typer()
app.command()(compare)
CLIP = example.clip_name(0)


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_it_writes_a_page_and_says_where(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(root, "--output", page)
    assert (code, err) == (0, "")
    assert out.startswith("1.7× to 2.1× faster at ")
    assert str(page) in out
    assert page.read_text().startswith("<!doctype html>\n<!-- jali-compare 1 -->")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_json_is_all_there_is_on_stdout(root: Path, tmp_path: Path) -> None:
    code, out, _ = run(root, "--json", "-o", tmp_path / "page.html")
    found = json.loads(out)
    assert code == 0
    assert found["kind"] == "jali-comparison"
    assert [row["name"] for row in found["rows"]] == ["dense", "entropy 0.3", "psa 0.15"]
    assert found["rows"][1]["speed_up"]["value"] == pytest.approx(1.7, abs=0.01)


def test_a_page_of_ours_is_replaced(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(root, "-o", page, "--metrics", "none")[0] == 0
    before = page.read_text()
    assert run(root / "dense", root / "psa", "-o", page, "--metrics", "none")[0] == 0
    assert page.read_text() != before


def test_the_examples_are_arguments_it_knows() -> None:
    parameters = {name for p in typer.main.get_command(app).params for name in p.opts}
    lines = [
        line.split() for line in (compare.__doc__ or "").splitlines() if "jali compare" in line
    ]
    assert len(lines) > 2
    for words in lines:
        assert {word for word in words if word.startswith("-")} <= parameters


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _rewrite(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    clip = read_clip(path)
    write_mp4(path, change(clip.frames), clip.fps)


def _edit(path: Path, key: str, value: object) -> None:
    found = json.loads(path.read_text())
    found[key] = value
    path.write_text(json.dumps(found))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


SPOILED = {
    "no such folder": (lambda psa: shutil.rmtree(psa), "there is no folder"),
    "an empty folder": (_empty, "holds neither a manifest.json nor videos"),
    "a file": (lambda psa: (shutil.rmtree(psa), psa.write_text("x")), "is a file"),
    "no video": (lambda psa: (psa / f"{CLIP}.mp4").unlink(), "is not there"),
    "an empty video": (lambda psa: (psa / f"{CLIP}.mp4").write_bytes(b""), "is empty"),
    "a cut video": (lambda psa: _cut(psa / f"{CLIP}.mp4"), "cannot be read as a video"),
    "no video at all": (lambda psa: (psa / f"{CLIP}.mp4").write_text("hello" * 99), "cannot be"),
    "another size": (
        lambda psa: _rewrite(psa / f"{CLIP}.mp4", lambda frames: frames[:, :, :128]),
        "is 128×96, but the reference",
    ),
    "another length": (
        lambda psa: _rewrite(psa / f"{CLIP}.mp4", lambda frames: frames[:9]),
        "has 9 frames, but its manifest says 13",
    ),
    "a damaged manifest": (lambda psa: _cut(psa / "manifest.json"), "manifest.json is not JSON"),
    "another kind of manifest": (
        lambda psa: _edit(psa / "manifest.json", "kind", "else"),
        "is not the manifest of a jali run",
    ),
    "a later manifest": (lambda psa: _edit(psa / "manifest.json", "version", 9), "version 9"),
    "no clips yet": (lambda psa: _edit(psa / "manifest.json", "clips", []), "has no clips yet"),
    "no sites": (lambda psa: (psa / f"{CLIP}.sites.json").unlink(), "is not there"),
    "damaged sites": (lambda psa: _cut(psa / f"{CLIP}.sites.json"), "sites.json is not JSON"),
    "later sites": (lambda psa: _edit(psa / f"{CLIP}.sites.json", "version", 7), "version 7"),
    "other sites": (
        lambda psa: _edit(psa / f"{CLIP}.sites.json", "rows", [{"layer": 0}]),
        "is not what `jali generate` writes",
    ),
    "a plan of another grid": (
        lambda psa: _edit(
            psa / f"{CLIP}.sites.json",
            "plans",
            [{**example.plan(0, example.SMALL, 1, 2, 0), "grid": [1, 2, 3]}],
        ),
        "for a grid of 1×2×3 tokens",
    ),
    "damaged metrics": (lambda psa: _cut(psa / "metrics.json"), "metrics.json is not JSON"),
    "other metrics": (
        lambda psa: _edit(psa / "metrics.json", "kind", "x"),
        "is not a jali-metrics file of version 1",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_bad_folders_are_refused_in_one_sentence(what: str, runs: Path, tmp_path: Path) -> None:
    spoil, sentence = SPOILED[what]
    spoil(runs / "psa")
    page = tmp_path / "page.html"
    page.write_text("<!doctype html>\n<!-- jali-compare 1 -->\nan earlier one")
    code, out, err = run(runs / "dense", runs / "psa", "-o", page)
    assert (code, out) == (2, ""), err
    assert err.startswith("jali: ")
    assert len(err.strip().splitlines()) == 1
    assert sentence in err
    assert page.read_text().endswith("an earlier one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "runs"]


def test_plain_folders_of_different_clips_are_refused(root: Path, tmp_path: Path) -> None:
    for name, clip in (("a", "one.mp4"), ("b", "two.mp4")):
        (tmp_path / name).mkdir()
        shutil.copy(root / "dense" / f"{CLIP}.mp4", tmp_path / name / clip)
    code, _, err = run(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "page.html")
    assert code == 2
    assert "no clip has the same name in every folder" in err
    shutil.move(tmp_path / "b" / "two.mp4", tmp_path / "b" / "one.mp4")
    _rewrite(tmp_path / "b" / "one.mp4", lambda frames: frames[:5])
    code, _, err = run(tmp_path / "a", tmp_path / "b", "-o", tmp_path / "page.html")
    assert code == 2
    assert "has 5 frames, but the reference" in err
    assert not (tmp_path / "page.html").exists()


def test_one_run_is_not_a_comparison(root: Path, tmp_path: Path) -> None:
    code, _, err = run(root / "dense", "-o", tmp_path / "page.html")
    assert code == 2
    assert "a comparison needs two" in err


def test_unknown_metrics_are_refused(root: Path, tmp_path: Path) -> None:
    code, _, err = run(root, "--metrics", "psnr,beauty", "-o", tmp_path / "page.html")
    assert code == 2
    assert "beauty" in err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_ours_stays(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text("<html>my homepage</html>")
    code, _, err = run(root, "-o", page)
    assert code == 2
    assert "is not a page of `jali compare`; it stays as it is" in err
    assert page.read_text() == "<html>my homepage</html>"


def test_an_output_that_cannot_be_is_refused(root: Path, tmp_path: Path) -> None:
    assert "is a folder" in run(root, "-o", tmp_path)[2]
    code, _, err = run(root, "-o", tmp_path / "nowhere" / "page.html")
    assert code == 2
    assert "there is no folder" in err
    assert not list(tmp_path.iterdir())


def test_without_jinja_it_says_what_to_install(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, err = run(root, "-o", tmp_path / "page.html")
    assert (code, err) == (2, "jali: a page needs jinja2: pip install 'jali[report]'\n")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    assert run(root, "-o", page, "--metrics", "none")[0] == 0
    before = page.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run(root, "-o", page, "--metrics", "none")
    assert code == 1
    assert err == f"jali: {page} cannot be written: No space left on device\n"
    assert page.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
