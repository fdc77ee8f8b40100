"""Whose folder it is: nothing is written where something else lies."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from jali import files
from jali.generation.manifest import NAME, RunFolder, RunFolderError, read_run
from jali.generation.settings import Settings

LOCK = ".lock"
ENDINGS = (".mkv", ".mp4", ".png", ".sites.json")  # of the files of a clip


def clip_name(number: int, prompt: str) -> str:
    """The same for a prompt in every run: its place and its first words."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    slug = ""
    for word in re.findall(r"[a-z0-9]+", plain):
        if len(slug) + len(word) > 40:
            break
        slug += f"-{word}"
    return f"{number:04d}{slug}"


def find_run(folder: Path, settings: Settings, prompts: Sequence[str]) -> RunFolder | None:
    """The unfinished (or finished) run that a folder holds; None where it can begin.

    Refuses a folder with anything else in it, and a run of other settings or prompts.
    """
    _check_folder(folder)
    names = visible_names(folder)
    first = clip_name(0, prompts[0])
    if all(name in {f"{first}{ending}" for ending in ENDINGS} for name in names):
        return None  # nothing, or what a process left that was killed before its first manifest
    if NAME not in names:
        some = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
        raise RunFolderError(
            f"{folder} holds {some} and no {NAME}, so it is not a run; choose another folder"
        )
    found = read_run(folder)
    other = settings.differences(found.settings)
    if other:
        # What was asked is told before what follows from it.
        told = [n for n in other if n != "attention"] or list(other)
        words = "; ".join(f"{n} is {_say(other[n][1])}, not {_say(other[n][0])}" for n in told[:3])
        raise RunFolderError(
            f"{folder} was made with other settings: {words}. Choose another folder, or the same "
            f"settings to continue it"
        )
    for number, (clip, prompt) in enumerate(zip(found.clips, prompts, strict=False)):
        if clip.prompt != prompt:
            raise RunFolderError(
                f"{folder} has another prompt at {number}: {clip.prompt!r}, not {prompt!r}; "
                f"choose another folder"
            )
    return found


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """The folder, for this process alone; made where there is none, and gone if nothing was
    written. The hold ends with the process, however it ends."""
    _check_folder(folder)
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunFolderError(f"{folder} cannot be written to")
    try:
        with files.lock(folder / LOCK, f"another process is writing to {folder}"):
            try:
                yield
            finally:
                (folder / LOCK).unlink(missing_ok=True)  # while it is ours
    except files.LockedError as error:
        raise RunFolderError(str(error)) from None
    finally:
        with contextlib.suppress(OSError):  # not empty, so it stays
            for path in missing:
                path.rmdir()


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what a killed process left of a clip: temporary files, and files no manifest lists."""
    for path in [*folder.glob(f".{name}.*"), *folder.glob(f"{name}.*"), *folder.glob(f".{NAME}.*")]:
        path.unlink(missing_ok=True)


def visible_names(folder: Path) -> list[str]:
    """What a folder holds, hidden files left out; nothing where there is none."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path.name for path in found if not path.name.startswith("."))


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, and a run needs a folder")


def _say(value: object) -> str:
    return "not set" if value is None else repr(value)
