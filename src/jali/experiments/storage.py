"""Result files: written whole or not at all, read strictly, told apart by their content."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class UnreadableError(ValueError):
    """A result file that is there but does not hold what it should."""


def canonical(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """The whole file or the old one: a reader never sees half, nor does a full disk leave it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        _sync_folder(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode(), durable=durable)


def read_json(path: Path, kind: str | None = None) -> dict[str, Any]:
    """The object in a file; `UnreadableError` where it is not one, or not of that kind."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnreadableError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableError(f"{path} holds a {type(value).__name__}, not an object")
    if kind is not None and (value.get("kind"), value.get("version")) != (kind, 1):
        raise UnreadableError(
            f"{path} is not a {kind} file of version 1: its kind is {value.get('kind')!r}, "
            f"its version {value.get('version')!r}"
        )
    return value


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """One more line of a list that only grows. Short enough that one write is one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, f"{canonical(value)}\n".encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line; one that a crash or a full disk cut short is not an entry."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    entries = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            entries.append(value)
    return entries


def _sync_folder(folder: Path) -> None:
    """So that the new name survives a power cut too; not every file system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
