"""The command line as a whole: quick, on one screen, with examples."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from jali.cli.main import app

Jali = Callable[..., Any]
COMMANDS = ("demo", "generate", "calibrate", "bench", "evaluate", "compare", "export", "book",
            "experiment", "presets", "inspect", "doctor")  # fmt: skip


def commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name)


def test_the_help_fits_a_screen(jali: Jali) -> None:
    done = jali("--help")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    for name in COMMANDS:
        assert f"│ {name} " in done.stdout, name


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_has_examples_and_says_what_it_does(
    words: tuple[str, ...], jali: Jali
) -> None:
    done = jali(*words, "--help")
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert "Example" in text, words
    assert f"jali {' '.join(words)}" in text.partition("Example")[2], words


def test_importing_the_command_line_is_quick() -> None:
    """No torch, no diffusers: help and refusals come at once."""
    heavy = ("torch", "numpy", "diffusers", "matplotlib", "av", "yaml", "jinja2")
    code = f"import sys, jali.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_version(jali: Jali) -> None:
    from jali import __version__

    assert jali("--version").stdout == f"jali {__version__}\n"
    command = [sys.executable, "-m", "jali", "--version"]
    assert subprocess.check_output(command, text=True) == f"jali {__version__}\n"


def test_unknown_words_are_refused(jali: Jali) -> None:
    assert jali("generat").exit_code == 2
    assert jali("generate", "--colour", "red").exit_code == 2
    assert jali("presets", "--help").exit_code == 0


def test_an_interrupt_ends_any_command(monkeypatch: pytest.MonkeyPatch, jali: Jali) -> None:
    import importlib

    module = importlib.import_module("jali.presets")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "presets", interrupted)
    done = jali("presets")
    assert done.exit_code == 130
    assert done.stderr == "jali: interrupted; what is finished is kept\n"
