"""Writing the page: whole or not at all, and never over a file that is not one of ours."""

from __future__ import annotations

import os
from pathlib import Path

from jali.error import InputError
from jali.evaluation.report.template import check_installed
from jali.files import write_text

# The first lines of every page that `jali compare` wrote hold this.
MARK = b"<!-- jali-compare "


def check_output(path: Path) -> None:
    """Refuse a page that cannot be made or written, before any work is done."""
    check_installed()
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file such as {path / 'compare.html'}")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} into")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path.parent} cannot be written to")
    if path.exists() and not _ours(path):
        raise InputError(
            f"{path} exists and is not a page of `jali compare`; it stays as it is, "
            "name another file"
        )


def write_page(path: Path, page: str) -> None:
    """Put `page` at `path`, in place of an earlier page of ours if there is one."""
    check_output(path)
    write_text(path, page)


def _ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return MARK in file.read(200)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
