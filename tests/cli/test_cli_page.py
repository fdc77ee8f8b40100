"""docs/cli.md is what the commands say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_commands_say() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
    assert script["main"](check=True) == 0


def test_every_command_has_its_section() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in ("demo", "generate", "bench kernel", "bench pipeline", "inspect", "doctor"):
        assert f"\n## jali {name}\n" in text
