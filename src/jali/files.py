"""Files that are written whole or not at all, the digests that tell them apart, and locks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jali.error import InputError, JobError

log = logging.getLogger("jali")

# Every file of ours is far smaller; a larger one is something else, and would fill the memory.
LARGEST_JSON = 256 * 2**20
# What file systems without locks answer.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


class WriteError(OSError):
    """A file that could not be written; the sentence names it as the person did.

    `errno` is the system's, where it gave one.
    """


class LockedError(JobError):
    """Another process is at work there."""


class UnreadableError(InputError):
    """A file that is there but does not hold what it should."""


def make_folder(folder: Path) -> None:
    """The folder and those above it, where they are missing; `WriteError` where they cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(f"{folder} cannot be made", error) from None


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = True, folder: Path | None = None) -> Iterator[Path]:
    """A new file beside `path` to write to. It takes `path`'s place when the block ends.

    Whatever goes wrong inside the block, the new file is gone and `path` is as it was. Only a
    process that is killed leaves the new file (`.NAME.….part`) behind. `durable` waits until the
    bytes are on the disk, so that not even a power cut can leave half a file. `folder`, on the same
    disk, holds the new file instead. Raises `WriteError` for whatever the system refuses, inside
    the block too.

    >>> with whole_file(Path("clip.mp4")) as temporary:  # doctest: +SKIP
    ...     encode(temporary)
    """
    temporary = (folder or path.parent) / f".{path.name}.{secrets.token_hex(4)}.part"
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        if durable:
            _sync(temporary)
        temporary.replace(path)
        if durable:
            with contextlib.suppress(OSError):  # not every file system can
                _sync(path.parent)  # so that the new name survives a power cut too
    except WriteError:
        raise
    except OSError as error:
        raise _write_error(f"{path} cannot be written", error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """The whole file or the old one. Missing folders are made."""
    make_folder(path.parent)
    with whole_file(path, durable=durable) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode(), durable=durable)


def write_json(path: Path, value: Any, *, sort_keys: bool = True, durable: bool = True) -> None:
    """As `write_text`: one value a line, keys sorted unless told otherwise, no NaN."""
    text = json.dumps(value, indent=1, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n", durable=durable)


def read_json(path: Path, kind: str | None = None) -> dict[str, Any]:
    """The object in a file; `UnreadableError` where it is not one, or not of that kind.

    A file that is not there is a `FileNotFoundError`. With a `kind`, the object's "kind" must be
    that and its "version" 1.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise UnreadableError(
                f"{path} has {size:,} bytes; files of this kind have at most {LARGEST_JSON:,}"
            )
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, UnreadableError):
        raise
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise UnreadableError(
            f"{path} is not JSON that can be read: it is nested too deep"
        ) from None
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


def canonical(value: Any) -> str:
    """One text for one JSON value: sorted keys, no spaces, no NaN.

    >>> canonical({"b": 1, "a": [1.5, None]})
    '{"a":[1.5,null],"b":1}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 of bytes, of a text, or of a JSON value (by its `canonical` text)."""
    if not isinstance(value, bytes | str):
        value = canonical(value)
    return hashlib.sha256(value if isinstance(value, bytes) else value.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock file at `path` while the block runs.

    `LockedError(refusal)` where somebody else holds it, another process or another block of this
    one; `WriteError` where the lock file cannot be made. The lock is let go when the process ends,
    however it ends; the file stays. A file system without locks is worked on without one, and the
    log says so.
    """
    held = FileLock(path, timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise LockedError(refusal) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise _write_error(f"{path} cannot be locked", error) from None
        log.warning("%s lies on a file system without locks: work there only once at a time", path)
    try:
        yield
    finally:
        held.release()


def _write_error(what: str, error: OSError) -> WriteError:
    found = WriteError(f"{what}: {error.strerror or error}")
    found.errno = error.errno
    return found


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
