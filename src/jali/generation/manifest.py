"""`manifest.json`: what a run folder says of itself, and how it is written."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jali.generation.settings import Settings

NAME = "manifest.json"
KIND = "jali-run"
VERSION = 1


class RunFolderError(ValueError):
    """A folder that is no run, or not the run that was asked for."""


@dataclass(frozen=True)
class ClipRecord:
    """One clip. `video`, `lossless` and `sites` are files of the same folder."""

    name: str
    prompt: str
    seed: int
    fps: float
    frames: int
    height: int
    width: int
    video: str
    lossless: str
    sites: str
    seconds: float
    seconds_transformer: float | None
    cost: float
    sparse_cost: float | None
    budget: float | None
    calls: int
    sparse_calls: int
    dense_reasons: Mapping[str, int]
    summary: str
    image: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(f for f in (self.video, self.lossless, self.sites, self.image) if f)


@dataclass(frozen=True)
class RunFolder:
    """A run folder: its settings, its clips in order, and whether all that were asked are there."""

    folder: Path
    settings: Settings
    clips: tuple[ClipRecord, ...] = ()
    complete: bool = False
    machine: Mapping[str, Any] | None = None
    versions: Mapping[str, str | None] | None = None
    jali: str = ""

    def path(self, file: str) -> Path:
        return self.folder / file

    def with_clip(self, clip: ClipRecord) -> RunFolder:
        return replace(self, clips=(*self.clips, clip))

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": VERSION,
            "jali": self.jali,
            "settings": self.settings.to_dict(),
            "digest": self.settings.digest,
            "machine": self.machine,
            "versions": self.versions,
            "complete": self.complete,
            "clips": [_plain(clip) for clip in self.clips],
        }

    def write(self) -> None:
        """The whole manifest or the one before it, never a part."""
        text = json.dumps(self.to_dict(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        with replaced(self.folder / NAME) as temporary:
            temporary.write_text(text, encoding="utf-8")


def read_run(folder: str | Path) -> RunFolder:
    """The run in a folder. Every clip it lists must have its files."""
    folder = Path(folder)
    file = folder / NAME
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}")
    if not file.is_file():
        raise RunFolderError(f"{folder} is no run folder: it holds no {NAME}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise RunFolderError(f"{file} is not the manifest of a jali run")
    if data.get("version") != VERSION:
        raise RunFolderError(
            f"{file} has version {data.get('version')!r}, written by jali {data.get('jali')}; "
            f"this one reads version {VERSION}"
        )
    try:
        settings = Settings.from_dict(data["settings"], str(file))
        clips = tuple(ClipRecord(**clip) for clip in data["clips"])
        run = RunFolder(
            folder,
            settings,
            clips,
            bool(data["complete"]),
            data["machine"],
            data["versions"],
            data["jali"],
        )
        digest = data["digest"]
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise RunFolderError(f"{file} is damaged: {reason}") from None
    if digest != settings.digest:
        raise RunFolderError(f"{file} was changed by hand: its settings do not match its digest")
    for clip in clips:
        for name in clip.files:
            if not (folder / name).is_file():
                raise RunFolderError(f"{folder} lists {name}, which is not there")
    return run


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place once it is whole and on disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _plain(clip: ClipRecord) -> dict[str, Any]:
    """Only image models have an `image`."""
    found = asdict(clip)
    return found if clip.image else {k: v for k, v in found.items() if k != "image"}
