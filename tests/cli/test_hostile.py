"""Files that were damaged, or made to do harm: each ends in one short line, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("av")
pytest.importorskip("jinja2")

from hostile import Jali, attack, check_end
from jali.cli.main import app
from jali.clips.clip import write_lossless, write_mp4
from jali.evaluation.quality.evaluation import evaluate
from jali.evaluation.quality.result import write_evaluation
from jali.generation.manifest import ClipRecord, RunFolder
from jali.generation.settings import Settings


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one small clip, as `jali generate` leaves them, and their metrics."""
    root = tmp_path_factory.mktemp("runs")
    frames = (torch.rand(2, 32, 32, 3, generator=torch.Generator().manual_seed(0)) * 255).byte()
    for method in ("dense", "entropy"):
        folder = root / method
        folder.mkdir()
        settings = Settings("nano", method=method, device="cpu").resolve()
        clip = ClipRecord(
            name="0000-a-ball", prompt="a réd “ball” 漢字", seed=0, fps=8.0, frames=2, height=32,
            width=32,
            video="0000-a-ball.mp4", lossless="0000-a-ball.mkv", sites="0000-a-ball.sites.json",
            seconds=1.5, seconds_transformer=1.0, cost=0.6, sparse_cost=0.5, budget=0.5, calls=2,
            sparse_calls=1, dense_reasons={"layer 0": 1}, summary="a line",
        )  # fmt: skip
        write_mp4(folder / clip.video, frames, 8)
        write_lossless(folder / clip.lossless, frames, 8)
        row = {"transformer": "transformer", "layer": 0, "step": 0, "branch": "both"}
        row |= {"cost": 0.5, "heads": [0.4, 0.6], "backend": "torch", "reason": None}
        plan = {"layer": 0, "step": 0, "branch": "cond", "grid": [1, 1, 2], "head": 0}
        plan |= {"query_block": 0, "query_tokens": [[0, 1]], "levels": "AQA="}
        facts = {"version": 1, "grid": [1, 1, 2], "layers": 1, "steps": 1, "heads": 2}
        (folder / clip.sites).write_text(json.dumps({**facts, "rows": [row], "plans": [plan]}))
        machine, versions = {"device": "cpu", "threads": 1}, {"torch": "2", "av": None}
        RunFolder(folder, settings, (clip,), True, machine, versions, "0.1").write()
    write_evaluation(
        evaluate(root / "dense", root / "entropy", ["psnr"]), root / "entropy/metrics.json"
    )
    return root


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_the_commands_work_on_what_is_sound(jali: Jali, runs: Path, out: Path) -> None:
    for command in commands(runs, out):
        done = jali(*command)
        assert done.exit_code == 0, done.stderr


def test_they_work_on_a_terminal_without_utf_8(runs: Path, out: Path) -> None:
    for command in [*commands(runs, out), ("compare", runs, "--output", out / "p.html", "--json")]:
        done = CliRunner(charset="ascii").invoke(app, [str(word) for word in command])
        assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["clips"] == ["0000-a-ball"]


def commands(runs: Path, out: Path) -> list[tuple[object, ...]]:
    page = out / "page.html"
    dense, sparse = runs / "dense", runs / "entropy"
    return [
        ("compare", dense, sparse, "--output", page),
        ("export", sparse, "--output-dir", out),
        ("compare", runs, "--output", page, "--metrics", "none"),
        ("evaluate", "--reference", dense, "--generated", sparse, "--metrics", "psnr",
         "--output", out / "metrics.json"),
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["manifest.json", "0000-a-ball.sites.json", "metrics.json"])
def test_files_of_a_run(jali: Jali, runs: Path, out: Path, file: str) -> None:
    chosen = commands(runs, out)
    attack(jali, runs, f"entropy/{file}", chosen if file == "manifest.json" else chosen[:1], out)


@pytest.mark.parametrize("key", ["name", "video", "lossless", "sites"])
@pytest.mark.parametrize("name", ["../secret.mkv", "/tmp/secret.mkv", "..", "link.mkv", "a\0b"])
def test_names_that_lead_elsewhere(
    jali: Jali, runs: Path, out: Path, tmp_path: Path, key: str, name: str
) -> None:
    copied = Path(shutil.copytree(runs, tmp_path / "runs"))
    shutil.copy(copied / "dense/0000-a-ball.mkv", copied / "secret.mkv")
    (copied / "entropy/link.mkv").symlink_to("../secret.mkv")
    file = copied / "entropy/manifest.json"
    facts = json.loads(file.read_text())
    facts["clips"][0][key] = name
    file.write_text(json.dumps(facts))
    for command in commands(copied, out):
        if command[0] != "compare" and key in ("video", "sites"):
            continue  # which these two do not read
        done = jali(*command)
        check_end(done, str(command))
        assert done.exit_code == 2, (command, done.stdout)
        assert "is damaged" in done.stderr
    assert not os.listdir(out)
    assert sorted(os.listdir(copied)) == ["dense", "entropy", "secret.mkv"]


PROMPTS = {
    "no UTF-8": (b"a cat\n\xff\xfe\n", "byte 6 of it is 0xff"),
    "UTF-16": ("a cat".encode("utf-16"), "is no text in UTF-8"),
    "a NUL": (b"a cat\na \0 dog\n", "without control signs"),
    "an escape": (b"a \x1b[2J cat", "without control signs"),
    "nothing": (b"", "holds no prompts"),
    "megabytes": (b"cat " * 1_000_000, "has 3,999,999 letters"),
    "too many megabytes": (b"cat\n" * 5_000_000, "has 20,000,000 bytes"),
}


@pytest.mark.parametrize("what", PROMPTS)
def test_prompts_that_are_none(jali: Jali, tmp_path: Path, what: str) -> None:
    content, words = PROMPTS[what]
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    refused(jali, tmp_path, words, "--prompts", file)


def test_prompts_without_an_end(jali: Jali, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/stdin"):
        refused(jali, tmp_path, "is not a regular file", "--prompts", path)
    refused(jali, tmp_path, "as a text file", "--prompts", tmp_path)
    refused(jali, tmp_path, "File name too long", "--prompts", tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--prompt", "a \udcff cat", "--prompt must be text in UTF-8"),
        ("--prompt", "a\0cat", "--prompt must be text in UTF-8 without control signs"),
        ("--prompt", "cat " * 30_000, "--prompt has 120,000 letters"),
        ("--prompt", " ", "--prompt is empty"),
        ("--negative-prompt", "\udcff", "--negative-prompt must be text in UTF-8"),
        ("--lora", "\udcff", "--lora must be text in UTF-8"),
        ("--seed", "9" * 400, "--seed must be a whole number of at least 0 and at most 9,223,"),
        ("--seed", str(2**63), "and at most 9,223,372,036,854,775,807, got 9223372036854775808"),
        ("--steps", "9" * 400, "--steps must be a count of at least 1 and at most 1,000,000"),
        ("--height", "9" * 30, "--height must be a count of at least 1 and at most 1,000,000"),
        ("--guidance", "1e999", "--guidance must be a number of at least 0, got inf"),
        ("--argument", "x=.nan", "--argument must be values that JSON can hold"),
        ("--argument", "x=2020-01-01", "--argument must be values that JSON can hold"),
        ("--argument", f"x={'9' * 400}", "--argument x: '999"),
        ("--argument", "x=" + "[" * 3000, "is not a value"),
        ("--argument", "x={a: &a [1,1,1,1,1,1,1,1,1], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], "
         "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b], d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c], "
         "e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d], f: [*e,*e,*e,*e,*e,*e,*e,*e,*e]}", "is not a value"),
        ("--config", "/dev/zero", "/dev/zero is not a regular file"),
    ],
)  # fmt: skip
def test_values_that_no_run_could_hold(
    jali: Jali, tmp_path: Path, flag: str, value: str, words: str
) -> None:
    refused(jali, tmp_path, words, flag, value)


def refused(jali: Jali, tmp_path: Path, words: str, *given: object) -> None:
    folder = tmp_path / "run"
    done = jali("generate", "--model", "nano", "--output-dir", folder, *given)
    check_end(done, str(given)[:200])
    assert done.exit_code == 2
    assert words in done.stderr
    assert not folder.exists()
