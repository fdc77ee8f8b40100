"""Terminals that know only ASCII: plainer signs, valid JSON, and no error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from jali.cli.main import app

GROUPS = (
    (), ("generate",), ("compare",), ("inspect",), ("bench", "pipeline"), ("doctor",), ("demo",),
    ("book", "show"), ("presets",), ("evaluate",), ("export",), ("experiment", "run"),
    ("calibrate",),
)  # fmt: skip


def call(*words: object) -> Any:
    """A command on a terminal that knows only ASCII."""
    done = CliRunner(charset="ascii").invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_help(words: tuple[str, ...]) -> None:
    assert call(*words, "--help").exit_code == 0


def test_tables_and_json() -> None:
    pytest.importorskip("diffusers")
    for words in (("doctor",), ("presets",), ("presets", "psa_balanced", "--model=cogvideox-5b")):
        done = call(*words)
        assert done.exit_code == 0
        assert done.stdout.isascii()
    assert "480x832x81" in call("doctor").stdout
    found = json.loads(call("doctor", "--json").stdout)
    assert found["models"]


def test_a_real_terminal_gives_bytes_that_are_utf_8() -> None:
    """Under LC_ALL=C arguments arrive as half letters; what they mean is found again."""
    code = (
        "import sys; from jali.generation.prompts import as_typed, check_prompt;"
        "text = as_typed(sys.argv[1]); check_prompt(text); assert text == chr(228), ascii(text)"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, "\u00e4".encode()]
    done = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
