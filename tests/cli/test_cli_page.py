"""docs/cli.md is what the commands say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_commands_say() -> None:
    script = ROOT / "docs" / "generate_cli.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_has_its_section() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in ("demo", "generate", "bench kernel", "bench pipeline", "inspect", "doctor"):
        assert f"\n## jali {name}\n" in text
