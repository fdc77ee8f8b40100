"""Where everything of an experiment lies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jali.files import UnreadableError, read_json

TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,119}")


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
    """The folder of all results and the folder of logs; absolute, since a job starts elsewhere.

    >>> results = Results("results", "experiments/logs")
    >>> results.speed("first").name
    'speed.json'
    """

    root: Path
    logs: Path

    def __post_init__(self) -> None:
        for name in ("root", "logs"):
            object.__setattr__(self, name, Path(getattr(self, name)).expanduser().absolute())

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
        """What a complete stage read and made."""
        return self.folder(tag) / "stages" / f"{stage}.json"

    def submissions(self, tag: str) -> Path:
        """One line for each time that a job was handed to a machine."""
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

    def tags(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob("[!_.]*/config.json"))

    def find_tags(self, names: Iterable[str]) -> list[str]:
        """The experiments that tags and names of sweeps stand for, each once. None named: all."""
        names, found = list(names), []
        for name in names:
            file = self.sweep(name) / "sweep.json"
            if file.exists():
                tags = read_json(file, "jali-sweep").get("tags")
                if not isinstance(tags, list):
                    raise UnreadableError(f"{file} lists no tags")
                found += [check_tag(str(tag)) for tag in tags]
            elif self.config(name).exists():
                found.append(name)
            else:
                self._refuse(name)
        return list(dict.fromkeys(found)) if names else self.tags()

    def _refuse(self, name: str) -> None:
        from jali.value import suggest

        sweeps = sorted(path.parent.name for path in self.root.glob("_sweeps/*/sweep.json"))
        known = [*sweeps, *self.tags()]
        raise FileNotFoundError(
            f"no experiment and no sweep {name!r} in {self.root}"
            + (suggest(name, known) if known else "")
        )
