"""Where a demonstration is written: all of it or nothing, in place of an earlier one at most."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jali.error import InputError
from jali.files import UnreadableError, read_json, write_json
from jali.generation.folder import hold_folder, visible_names

# Every demonstration has one, so it tells our folders from others.
FACTS = "demo.json"
KIND = "jali-demo"
PART = ".part"


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier demonstration."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, and the demo needs a folder")
    own = _own_files(folder)
    others = [name for name in visible_names(folder) if name not in own]
    if others:
        some = ", ".join(others[:3]) + (" and more" if len(others) > 3 else "")
        raise InputError(
            f"{folder} holds {some}, which no demo wrote; name another folder with --output-dir"
        )


@contextlib.contextmanager
def replace_demo(folder: Path) -> Iterator[Path]:
    """A hidden place to write to. What is in it becomes the folder once the block is done.

    Left in any other way, it is gone and the folder is as it was.
    """
    check_folder(folder)
    with hold_folder(folder):
        part = folder / PART
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir()
        try:
            yield part
            _publish(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def write_facts(part: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The last file of a demonstration: what it found, and which files are its own."""
    whole = {"kind": KIND, "version": 1, **facts, "files": sorted([FACTS, *visible_names(part)])}
    write_json(part / FACTS, whole)
    return whole


def _publish(part: Path, folder: Path) -> None:
    """By renaming alone. The folder has the file that makes it ours at every moment."""
    before = part / ".before"
    before.mkdir()
    for name in _own_files(folder):
        if name != FACTS and (folder / name).exists():
            (folder / name).rename(before / name)
    (part / FACTS).replace(folder / FACTS)
    for name in visible_names(part):
        (part / name).rename(folder / name)


def _own_files(folder: Path) -> list[str]:
    """Names at the top of the folder; none where it is no demonstration."""
    try:
        found = read_json(folder / FACTS, KIND)
    except (OSError, UnreadableError):
        return []
    names = [str(name) for name in found.get("files") or ()]
    return [name for name in names if Path(name).name == name and not name.startswith(".")]
