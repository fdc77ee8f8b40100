"""Where a demonstration is written: all of it or nothing, in place of an earlier one at most."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from jali.generation.folder import hold_folder
from jali.generation.manifest import RunFolderError, replaced

# Every demonstration has one, so it tells our folders from others.
FACTS = "demo.json"
KIND = "jali-demo"
PART = ".part"


def check(folder: Path) -> None:
    """Refuse a folder that holds anything but an earlier demonstration."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file, and the demo needs a folder")
    own = _files(folder / FACTS)
    others = [name for name in _visible(folder) if name not in own] if folder.exists() else []
    if others:
        some = ", ".join(others[:3]) + (" and more" if len(others) > 3 else "")
        raise RunFolderError(
            f"{folder} holds {some}, which no demo wrote; name another folder with --output-dir"
        )


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A hidden place to write to. What is in it becomes the folder once the block is done.

    Left in any other way, it is gone and the folder is as it was.
    """
    check(folder)
    with hold_folder(folder):
        part = folder / PART
        _remove(part)  # of a process that was killed
        part.mkdir()
        try:
            yield part
            _publish(part, folder)
        finally:
            _remove(part)


def write_facts(part: Path, facts: dict[str, object]) -> dict[str, object]:
    """The last file of a demonstration: what it found, and which files are its own."""
    files = sorted([FACTS, *_visible(part)])
    whole = {"kind": KIND, "version": 1, **facts, "files": files}
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with replaced(part / FACTS) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return whole


def _publish(part: Path, folder: Path) -> None:
    """By renaming alone. The folder has the file that makes it ours at every moment."""
    before = part / ".before"
    before.mkdir()
    for name in _files(folder / FACTS):
        if name != FACTS and (folder / name).exists():
            (folder / name).rename(before / name)
    names = _visible(part)
    (part / FACTS).replace(folder / FACTS)
    for name in names:
        if name != FACTS:
            (part / name).rename(folder / name)


def _files(facts: Path) -> list[str]:
    """Names at the top of the folder; none where the file is not one of ours."""
    try:
        found = json.loads(facts.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict) or found.get("kind") != KIND:
        return []
    names = [str(name) for name in found.get("files") or ()]
    return [name for name in names if Path(name).name == name and not name.startswith(".")]


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
