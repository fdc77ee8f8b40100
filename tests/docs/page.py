"""The fenced blocks of README and docs, and what marks one that is not run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = {
    "README.md": README,
    "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md",
    **{str(p.relative_to(ROOT / "docs")): p for p in sorted((ROOT / "docs").rglob("*.md"))},
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = ("bash", "sh", "console")
# The mark is the block's own first line, so that readers see it too.
MARK = re.compile(r"# (needs .+)")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def needs(self) -> str | None:
        """Why it cannot run here, in its own words; None where it can."""
        found = MARK.match(self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block, continuations joined and comments gone."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = (shlex.join(shlex.split(line, comments=True)) for line in lines)
        return [line for line in words if line]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language = match[1]
        if not language and re.match(r"(jali|make|pip|python) ", match[2]):
            language = "bash"
        found.append(Block(page, text[: match.start()].count("\n") + 2, language, match[2]))
    return found


def python(page: str) -> list[Block]:
    return [b for b in blocks(page) if b.language == "python"]


def shell(page: str) -> list[Block]:
    return [b for b in blocks(page) if b.language in SHELL]
