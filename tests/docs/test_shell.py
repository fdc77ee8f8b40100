"""Every command of README and docs: run on small models, or at least read by the real command."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page import PAGES, ROOT, Block, shell

# The command lines of these pages are read by the real commands but not run, and why.
READ_ONLY = {
    "cli.md": "single examples for files that are not there; each command's own tests run it",
    "scale.md": "needs Slurm: tests/experiments/test_recipes.py",
    "experiments.md": "takes minutes: tests/sweep/test_quick_sweep.py runs that sweep",
}
# The flags that make a command small: of a flag given twice the last value counts.
SIZE = ("--height=32", "--width=48", "--num-frames=5", "--steps=4", "--device=cpu")
TEXT = "--argument=max_sequence_length=16"
SHRUNK = {
    "generate": (*SIZE, TEXT),
    "calibrate": SIZE,
    "inspect": (*SIZE, TEXT),
    "bench pipeline": (*SIZE, TEXT),
    "arena": (*SIZE, TEXT, "--totals=0.9"),
    "tune": (*SIZE, TEXT),
}
LINES = [(block, line) for page in PAGES for block in shell(page) for line in block.commands]


def words_of(line: str) -> list[str] | None:
    """The words behind `jali`, up to a redirection; None where it is another program's line."""
    words = shlex.split(line)
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    if Path(words[0]).name != "jali":
        return None
    return words[1 : words.index(">")] if ">" in words else words[1:]


def command_of(words: list[str]) -> tuple[str, Any, list[str]]:
    """(name, command, the rest of the words)."""
    import typer

    from jali.cli.main import app

    command: Any = typer.main.get_command(app)
    name: list[str] = []
    while hasattr(command, "commands"):
        word = words[len(name)]
        assert word in command.commands, f"jali {' '.join(name)} has no command {word!r}"
        name.append(word)
        command = command.commands[word]
    return " ".join(name), command, words[len(name) :]


@pytest.mark.parametrize(
    ("block", "line"), LINES, ids=[f"{b}-{i}" for i, (b, _) in enumerate(LINES)]
)
def test_every_line_names_what_exists(block: Block, line: str) -> None:
    """Flags and values of jali's own commands, make's targets, pip's extras, scripts."""
    words = words_of(line)
    if words is not None and "$" not in line:
        name, command, rest = command_of(words)
        command.make_context(name, list(rest))
    elif line.startswith("make "):
        dry = ["make", "-n", *shlex.split(line)[1:]]
        done = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif "pip install" in line:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for names in re.findall(r"\[([^]]+)\]", line):
            assert set(names.split(",")) <= set(extras["optional-dependencies"]), line
    elif line.startswith(("python ", ".ci/")):
        script = next(word for word in shlex.split(line) if "/" in word)
        assert (ROOT / script).exists(), line
    else:
        assert block.page == "scale.md" or line.startswith(("uv ", "source ")), line


RUN = [p for p in PAGES if any(words_of(line) for b in shell(p) for line in b.commands)]


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(
    page: str, small: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in READ_ONLY:
        pytest.skip(READ_ONLY[page])
    pytest.importorskip("av")
    monkeypatch.setenv("JALI_WEIGHTS", str(small / "none"))  # no LPIPS: it takes longer than all
    (small / "none").mkdir()
    prepare(page, small)
    for block in shell(page):
        for line in block.commands if block.needs is None else ():
            words = words_of(line)
            if words is not None:
                run(words, checkpoint)


@pytest.mark.parametrize("block", [b for p in PAGES for b in shell(p) if b.needs], ids=str)
def test_what_does_not_run_says_why(block: Block) -> None:
    """Its lines were read above; the reason is the block's own first line."""
    pytest.skip(str(block.needs))


def run(words: list[str], checkpoint: Callable[[str], Path]) -> None:
    from typer.testing import CliRunner

    from jali.cli.main import app

    name, command, rest = command_of(words)
    if name in SHRUNK:
        given = command.make_context(name, list(rest)).params
        words = [*words, *SHRUNK[name], f"--path={checkpoint(given['model'])}"]
        if not given.get("prompt") and not given.get("prompts"):
            words.append(f"--num-prompts={2 if name == 'tune' else 1}")  # one half judges
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"jali {shlex.join(words)}\n{done.output}\n{done.exception!r}"


def prepare(page: str, folder: Path) -> None:
    """What a page takes for granted."""
    import example

    if page == "quality.md":
        example.make_three(folder / "out", clips=1)
    if page == "reports.md":
        example.make_three(folder / "runs", clips=1)
        for name, run_name in (("before", "dense"), ("after", "entropy")):
            (folder / name).mkdir()
            for film in (folder / "runs" / run_name).glob("*.mp4"):
                shutil.copy(film, folder / name)


@pytest.mark.slow
def test_the_first_commands_with_the_real_nano(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a prompt to a page, as README says it, with the model of the package."""
    from typer.testing import CliRunner

    from jali import nano
    from jali.cli.main import app

    missing = [p for p in ("model_index.json", "transformer") if not (nano.folder() / p).exists()]
    if missing:
        pytest.skip(f"needs nano's weights, and {nano.folder().name} has no {missing[0]}")
    monkeypatch.chdir(tmp_path)
    runnable = [block for block in shell("README.md") if block.needs is None]
    lines = [line for block in runnable for line in block.commands]
    words = [w for w in map(words_of, lines) if w and w[0] in ("generate", "compare")]
    assert [w[0] for w in words] == ["generate", "compare"]
    size = ("--height=128", "--width=128", "--num-frames=33", "--steps=4")
    for command in ([*words[0], *size], [*words[1], "--metrics=psnr"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert "<html" in Path("compare.html").read_text(encoding="utf-8")
