"""`jali calibrate` and `jali book` on the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import books
import pytest
import tiny
import typer
from typer.testing import CliRunner, Result

from jali import files
from jali.cli import book as book_command
from jali.cli import calibrate as calibrate_command
from jali.maskbook import MaskBook

app = typer.Typer(pretty_exceptions_enable=False)
app.add_typer(book_command.app, name="book")
app.command("calibrate")(calibrate_command.calibrate)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    books.make(tmp_path / "a.safetensors", model="wan-t2v-1.3b")
    return tmp_path / "a.safetensors"


class TestInfo:
    def test_words(self, path: Path) -> None:
        done = run("book", "info", path, "--verify")
        assert done.exit_code == 0
        for part in ("wan-t2v-1.3b", "3×4×9", "4 steps × 2 layers × 3 heads", "0.3 (cost",
                     "off by at most 2.", "every checksum is right"):  # fmt: skip
            assert part in done.output

    def test_json(self, path: Path) -> None:
        facts = json.loads(run("book", "info", path, "--json").stdout)
        assert facts["steps"] == 4
        assert facts["budgets"] == [0.3, 0.5]
        assert facts["bytes"] == path.stat().st_size
        assert facts["bits_bytes"] == 2 * 4 * 2 * 3 * 7 * 2

    @pytest.mark.parametrize("command", ["info", "show"])
    def test_no_book(self, tmp_path: Path, command: str) -> None:
        for name, word in (("no.safetensors", "no book at"), ("x.pt", "pickle")):
            done = run("book", command, tmp_path / name)
            assert done.exit_code == 2
            assert done.stderr.startswith("jali: ")
            assert word in done.stderr

    def test_damage(self, path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[-2000] ^= 1
        path.write_bytes(raw)
        done = run("book", "info", path, "--verify")
        assert done.exit_code == 2
        assert "damaged" in done.stderr


class TestShow:
    def test_a_picture_of_heads_over_steps(self, path: Path, tmp_path: Path) -> None:
        done = run("book", "show", path, "--budget", 0.4, "--output", tmp_path / "a.png")
        assert done.exit_code == 0, done.stderr
        assert "budget 0.4" in done.stdout
        assert done.stdout.count("layer ") >= 2
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"

    def test_json(self, path: Path) -> None:
        table = json.loads(run("book", "show", path, "--layer", 1, "--json").stdout)
        assert table["budget"] == 0.5
        assert len(table["layers_by_steps"]) == 2
        costs = MaskBook.open(path).costs(0.5)
        assert table["heads_by_steps"][2][3] == pytest.approx(float(costs[3, 1, 0, 2]), abs=1e-5)

    def test_a_large_one_fits_a_terminal(self, tmp_path: Path) -> None:
        steps = 60
        books.make(
            tmp_path / "large.safetensors", layers=12, heads=9, transformers=("transformer",) * 60,
            noise=tuple(1 - i / steps for i in range(steps)), budgets=(0.5,),
        )  # fmt: skip
        done = run("book", "show", tmp_path / "large.safetensors")
        assert "108 heads are too many lines" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
        done = run("book", "show", tmp_path / "large.safetensors", "--layer", 11)
        assert "head 8" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80

    def test_refused(self, path: Path) -> None:
        assert "not one of the book's 2 layers" in run("book", "show", path, "--layer", 7).stderr
        done = run("book", "show", path, "--budget", 3)
        assert done.exit_code == 2
        assert "budget" in done.stderr


class TestOfRd:
    @pytest.fixture
    def of_rd(self, tmp_path: Path) -> Path:
        books.make_errors(tmp_path / "rd.safetensors", model="wan-t2v-1.3b")
        return tmp_path / "rd.safetensors"

    def test_info(self, of_rd: Path) -> None:
        done = run("book", "info", of_rd, "--verify")
        assert done.exit_code == 0
        words = " ".join(done.output.split())
        for part in ("3 parts of a run × 2 layers × 3 heads", "any, and any number of steps",
                     "of the levels 2, 4, 8, mean, skip; a table serves 30% of a run",
                     "every checksum is right"):  # fmt: skip
            assert part in words
        facts = json.loads(run("book", "info", of_rd, "--json").stdout)
        assert facts["format"] == 2
        assert facts["errors_bytes"] == 3 * 2 * 3 * (7 * 14 * 5 + 4)
        assert facts["bytes"] == of_rd.stat().st_size

    def test_show(self, of_rd: Path, tmp_path: Path) -> None:
        done = run("book", "show", of_rd, "--budget", 0.4, "--output", tmp_path / "a.png")
        assert done.exit_code == 0, done.stderr
        assert "budget 0.4, cost 0.39" in done.stdout
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
        table = json.loads(run("book", "show", of_rd, "--layer", 1, "--json").stdout)
        assert table["budget"] == 0.5
        costs = MaskBook.open(of_rd).costs(0.5)
        assert table["heads_by_steps"][2][3] == pytest.approx(float(costs[3, 1, 0, 2]), abs=1e-5)

    def test_what_cannot_be_made_of_it(self, of_rd: Path, path: Path, tmp_path: Path) -> None:
        new = tmp_path / "new.safetensors"
        for words, match in (
            (("resample", of_rd, "--steps", 9), "serves any number of steps"),
            (("resample", of_rd, "--grid", "2x4x9"), "calibrate at that size"),
            (("merge", of_rd, path), "importance, the other one the errors of rd"),
        ):
            done = run("book", *words, "--output", new)
            assert done.exit_code == 2
            assert match in done.stderr
            assert not new.exists()


class TestMake:
    def test_resample(self, path: Path, tmp_path: Path) -> None:
        new = tmp_path / "b.safetensors"
        done = run("book", "resample", path, "--grid", "2x4x6", "--steps", 3, "--output", new)
        assert done.exit_code == 0, done.stderr
        made = MaskBook.open(new)
        assert (str(made.grid), made.steps) == ("2×4×6", 3)
        done = run("book", "resample", path, "--noise", "0.9,0.1", "--output", new, "--json")
        assert json.loads(done.stdout)["noise"] == [0.9, 0.1]

    @pytest.mark.parametrize(
        ("words", "match"),
        [
            (("--grid", "2x4"), "--grid is frames"),
            (("--grid", "0x4x4"), "--grid is frames"),
            (("--noise", "a,b"), "--noise are numbers"),
            (("--noise", "0.5", "--steps", 3), "not both"),
            ((), "needs a grid"),
        ],
    )
    def test_resample_refused(self, path: Path, tmp_path: Path, words: Any, match: str) -> None:
        done = run("book", "resample", path, *words, "--output", tmp_path / "b.safetensors")
        assert done.exit_code == 2
        assert match in done.stderr
        assert not (tmp_path / "b.safetensors").exists()

    def test_merge(self, path: Path, tmp_path: Path) -> None:
        books.make(tmp_path / "b.safetensors", prompts=("z" * 32,), seed=2)
        done = run("book", "merge", path, tmp_path / "b.safetensors", "--output",
                   tmp_path / "c.safetensors", "--json")  # fmt: skip
        assert json.loads(done.stdout)["prompts"] == 2
        done = run("book", "merge", path, path, "--output", tmp_path / "d.safetensors")
        assert done.exit_code == 2
        assert "count twice" in done.stderr


class TestCalibrate:
    @pytest.fixture
    def words(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
        from jali.integration.models import pipeline as models

        monkeypatch.setattr(models, "load_pipeline", lambda *_, **__: tiny.wan())
        (tmp_path / "prompts.txt").write_text("a cat\n\n# not this\na dog\na bird\n")
        return [
            "calibrate", "--model", "wan-t2v-1.3b", "--prompts", tmp_path / "prompts.txt",
            "--height", 128, "--width", 128, "--num-frames", 9, "--steps", 2, "--guidance", 1.0,
            "--q-block", 32, "--k-block", 16, "--output", tmp_path / "b.safetensors",
        ]  # fmt: skip

    def test_a_book(self, words: list[Any], tmp_path: Path) -> None:
        done = run(*words, "--num-prompts", 2, "--budgets", "0.6,0.4", "--json")
        assert done.exit_code == 0, done.stderr
        facts = json.loads(done.stdout)
        assert facts["prompts"] == 2
        assert facts["budgets"] == [0.4, 0.6]
        assert facts["blocks"] == [32, 16]
        assert facts["steps"] == 2
        assert MaskBook.open(tmp_path / "b.safetensors").header.model == "wan-t2v-1.3b"
        again = run(*words, "--num-prompts", 2, "--budgets", "0.6,0.4", "--resume")
        assert again.exit_code == 0
        assert "2 prompts" in again.stdout

    def test_a_book_of_rd(self, words: list[Any], tmp_path: Path) -> None:
        more = ("--method", "rd", "--option", "samples=2", "--option", "keep=0.5")
        done = run(*words, *more, "--num-prompts", 1)
        assert done.exit_code == 0, done.stderr
        assert "the book will have about 259.2 kB; up to 2.1 MB lie beside it" in done.stderr
        made = MaskBook.open(tmp_path / "b.safetensors")
        assert made.header.errors is not None
        assert (made.header.errors.keep, made.header.outer) == (0.5, (2, 3))
        assert made.header.blocks.q == 32
        assert made.header.sizes()["errors"] == 2 * 3 * 2 * 6 * 12 * 5

    @pytest.mark.parametrize(
        ("more", "match"),
        [
            (("--method", "rd", "--option", "keep=3"), "keep is a share of the run"),
            (("--method", "rd", "--option", "price=3.0"), "leave price out"),
            (("--method", "rd", "--option", "stride=3"), "stride"),
            (("--method", "rd", "--k-block", 12), "cannot be pooled 8"),
            (("--method", "rd", "--height", 4096, "--width", 4096), "larger blocks"),
            (("--budgets", "half"), "--budgets are numbers"),
            (("--budgets", "2"), "budgets"),
            (("--num-prompts", 9), "only 3 prompts"),
            (("--branches", "both"), "branches"),
            (("--output", "x.pt"), "never a pickle"),
            (("--model", "wan"), "wan"),
        ],
    )
    def test_refused(self, words: list[Any], more: Any, match: str) -> None:
        done = run(*words, *more)
        assert done.exit_code == 2
        assert match in done.stderr

    def test_two_at_once(self, words: list[Any], tmp_path: Path) -> None:
        """The second one ends with one sentence, and disturbs nothing."""
        folder = tmp_path / "b.safetensors.partial"
        folder.mkdir()
        with files.lock(folder / "lock", "held"):
            done = run(*words, "--resume", "--json")
            assert os.listdir(folder) == ["lock"]
        assert done.exit_code == 1
        assert done.stderr == f"jali: another calibration is writing to {folder}\n"

    def test_a_missing_file(self, words: list[Any], tmp_path: Path) -> None:
        done = run(*words, "--prompts", tmp_path / "none.txt")
        assert done.exit_code == 2
        assert "none.txt" in done.stderr


@pytest.mark.parametrize(
    "words", [("calibrate",), ("book", "info"), ("book", "show"), ("book", "resample"),
              ("book", "merge"), ("book", "import")],
)  # fmt: skip
def test_help(words: tuple[str, ...]) -> None:
    done = run(*words, "--help")
    assert done.exit_code == 0
    if words != ("calibrate",):  # whose examples are set where the command is registered
        assert "Examples" in done.stdout
