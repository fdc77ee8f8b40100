"""`manifest.json`: what a run folder says of itself, and how it is read and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jali import files
from jali.error import InputError, shorten, show
from jali.generation.settings import Settings

NAME = "manifest.json"
KIND = "jali-run"
VERSION = 1


class RunFolderError(InputError):
    """A folder that is no run, or not the run that was asked for."""


@dataclass(frozen=True)
class ClipRecord:
    """One clip. `video`, `lossless`, `sites` and `image` are files of the same folder."""

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
    image: str | None = None  # of image models alone
    cold: bool = False  # its seconds hold what is loaded, compiled and tuned once
    seconds_first_call: float | None = None  # of a cold one: its first transformer call's

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(f for f in (self.video, self.lossless, self.sites, self.image) if f)

    def to_dict(self) -> dict[str, Any]:
        said = asdict(self)
        if self.image is None:
            del said["image"]
        if not self.cold:
            del said["cold"]
        if self.seconds_first_call is None:
            del said["seconds_first_call"]
        return said


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

    def with_clip(self, clip: ClipRecord, complete: bool) -> RunFolder:
        return replace(self, clips=(*self.clips, clip), complete=complete)

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
            "clips": [clip.to_dict() for clip in self.clips],
        }

    def write(self) -> None:
        """The whole manifest or the one before it, never a part."""
        files.write_json(self.folder / NAME, self.to_dict())


def read_run(folder: str | Path) -> RunFolder:
    """The run in a folder. Every clip it lists must have its files.

    Raises `RunFolderError` where the folder is none, or its manifest is damaged, of another
    version, or changed by hand.

    >>> [clip.cost for clip in read_run("runs/mine/entropy").clips]  # doctest: +SKIP
    """
    from jali.presets import schema  # which needs torch, as the commands' help does not

    folder = Path(folder)
    file = folder / NAME
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}")
    if not file.is_file():
        raise RunFolderError(f"{folder} is no run folder: it holds no {NAME}")
    try:
        data = files.read_json(file)
    except files.UnreadableError as error:
        raise RunFolderError(str(error)) from None
    if data.get("kind") != KIND:
        raise RunFolderError(f"{file} is not the manifest of a jali run")
    if data.get("version") != VERSION:
        raise RunFolderError(
            f"{file} has version {show(data.get('version'))}, written by jali "
            f"{show(data.get('jali'))}; this one reads version {VERSION}"
        )
    try:
        settings = Settings.from_dict(data["settings"], str(file))
        clips = schema.read(tuple[ClipRecord, ...], data["clips"], "clips")
        facts = {
            name: schema.read(kind, data[name], name)
            for name, kind in schema.field_types(RunFolder).items()
            if name not in ("folder", "settings", "clips")
        }
        digest = data["digest"]
        for clip in clips:
            for name in (clip.name, *clip.files):
                files.path_inside(folder, name)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else shorten(error)
        raise RunFolderError(f"{file} is damaged: {reason}") from None
    if digest != settings.digest:
        raise RunFolderError(f"{file} was changed by hand: its settings do not match its digest")
    for name in (name for clip in clips for name in clip.files):
        if not (folder / name).is_file():
            raise RunFolderError(f"{folder} lists {name}, which is not there")
    return RunFolder(folder, settings, clips, **facts)
