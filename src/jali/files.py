"""Files that are written whole or not at all, the digests that tell them apart, and locks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


class WriteError(OSError):
    """A file that could not be written; the sentence names it as the person did."""


class LockedError(RuntimeError):
    """Another process is at work there."""


class UnreadableError(ValueError):
    """A file that is there but does not hold what it should."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new file beside `path` to write to. It takes `path`'s place once it is on the disk.

    Whatever goes wrong inside the block, it is gone and `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """The whole file or the old one. Missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """As `write_text`: sorted keys, one value a line, no NaN."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n")


def read_json(path: Path, kind: str | None = None) -> dict[str, Any]:
    """The object in a file; `UnreadableError` where it is not one, or not of that kind."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableError(f"{path} holds a {type(value).__name__}, not an object")
    if kind is not None and (value.get("kind"), value.get("version")) != (kind, 1):
        raise UnreadableError(
            f"{path} is not a {kind} file of version 1: its kind is {value.get('kind')!r}, "
            f"its version {value.get('version')!r}"
        )
    return value


def canonical(value: Any) -> str:
    """One text for one JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 of bytes, of a text, or of a JSON value."""
    if not isinstance(value, bytes | str):
        value = canonical(value)
    return hashlib.sha256(value if isinstance(value, bytes) else value.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock file at `path` while the block runs; `LockedError(refusal)` where another
    process has it. It is let go when the process ends, however it ends."""
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise LockedError(refusal) from None


def _sync_folder(folder: Path) -> None:
    """So that the new name survives a power cut too; not every file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
