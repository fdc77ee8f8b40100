"""Whose folder it is: nothing is written where something else lies."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from jali.generation.manifest import NAME, RunFolder, RunFolderError, read_run
from jali.generation.settings import Settings


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
    if not folder.exists() or not _visible(folder):
        return None
    if not (folder / NAME).is_file():
        raise RunFolderError(
            f"{folder} holds {_some(_visible(folder))} and no {NAME}, so it is not a run; "
            f"choose another folder"
        )
    found = read_run(folder)
    other = settings.differences(found.settings)
    if other:
        # What was asked is told before what follows from it.
        names = [n for n in other if n != "attention"] or list(other)
        told = "; ".join(f"{n} is {_say(other[n][1])}, not {_say(other[n][0])}" for n in names[:3])
        raise RunFolderError(
            f"{folder} was made with other settings: {told}. Choose another folder, or the same "
            f"settings to continue it"
        )
    for number, clip in enumerate(found.clips):
        if number < len(prompts) and clip.prompt != prompts[number]:
            raise RunFolderError(
                f"{folder} has another prompt at {number}: {clip.prompt!r}, not "
                f"{prompts[number]!r}; choose another folder"
            )
    return found


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """The folder, for this process alone; made where there is none, and gone if nothing was
    written. The claim ends with the process, however it ends."""
    _check_folder(folder)
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunFolderError(f"{folder} cannot be written to")
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):  # not empty, so it stays
            for path in missing:
                path.rmdir()


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, and a run needs a folder")


def _lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunFolderError(f"another process is writing to {folder}") from None
    except OSError:  # a file system without locks
        return


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what a killed process left of a clip: temporary files, and files no manifest lists."""
    for path in [*folder.glob(f".{name}.*"), *folder.glob(f"{name}.*"), *folder.glob(f".{NAME}.*")]:
        path.unlink(missing_ok=True)


def _visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


def _say(value: object) -> str:
    return "not set" if value is None else repr(value)
