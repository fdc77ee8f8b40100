"""Where everything of an experiment lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,119}")
STAGES = "stages"


def check_tag(tag: str, what: str = "a tag") -> str:
    """A tag names a folder, so it is one plain word."""
    if not TAG.fullmatch(tag):
        raise ValueError(
            f"{what} is up to 120 letters, digits and . _ + = -, beginning with a letter or digit, "
            f"got {tag!r}"
        )
    return tag


@dataclass(frozen=True, slots=True)
class Results:
    """The results folder and the folder of logs; absolute, since a job starts elsewhere."""

    root: Path
    logs: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).expanduser().absolute())
        object.__setattr__(self, "logs", Path(self.logs).expanduser().absolute())

    def folder(self, tag: str) -> Path:
        return self.root / check_tag(tag)

    def config(self, tag: str) -> Path:
        return self.folder(tag) / "config.json"

    def state(self, tag: str) -> Path:
        return self.folder(tag) / "state.json"

    def speed(self, tag: str) -> Path:
        return self.folder(tag) / "speed.json"

    def quality(self, tag: str) -> Path:
        return self.folder(tag) / "quality.json"

    def record(self, tag: str, stage: str) -> Path:
        return self.folder(tag) / STAGES / f"{stage}.json"

    def begun(self, tag: str, stage: str) -> Path:
        """The inputs of a stage that was begun, so that another attempt knows what lies there."""
        return self.folder(tag) / STAGES / f"{stage}.begun.json"

    def ledger(self, tag: str) -> Path:
        """What was submitted for this tag, one line for each time."""
        return self.folder(tag) / "submissions.jsonl"

    def cancelled(self, tag: str) -> Path:
        """Who cancelled it; gone again when it is retried."""
        return self.folder(tag) / "cancelled.json"

    def lock(self, tag: str) -> Path:
        return self.folder(tag) / "lock.json"

    def log(self, tag: str) -> Path:
        return self.logs / f"{check_tag(tag)}.log"

    def sweep(self, name: str) -> Path:
        """A tag cannot begin with an underscore, so a sweep's folder is never an experiment's."""
        return self.root / "_sweeps" / check_tag(name, "a sweep's name")

    def sweep_file(self, name: str) -> Path:
        return self.sweep(name) / "sweep.json"

    def sweeps(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob("_sweeps/*/sweep.json"))

    def tags(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob("[!_.]*/config.json"))
