"""Files that are written whole or not at all, the digests that tell them apart, and locks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jali.error import InputError, JobError, shorten

log = logging.getLogger("jali")

# Every file of ours is far smaller; a larger one is something else, and would fill the memory.
LARGEST_JSON = 256 * 2**20
DEEPEST_JSON = 100
LONGEST_NUMBER = 20  # digits of a whole one: more than 64 bits hold
LONGEST_NAME = 255  # bytes, on every usual file system
_PART = re.compile(r"[0-9a-f]{8}\.part")  # how the name of an unfinished file ends
# Opening one of these may run any program: no book is read from one, and none written to one.
PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")
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


def check_place(path: Path) -> None:
    """Refuse, before any work, a file or folder that could not be made there: `WriteError`."""
    try:
        above = next(folder for folder in path.absolute().parents if folder.exists())
        if path.is_dir():
            above = path
    except OSError as error:  # a name that is too long, a folder that must not be looked into
        raise _write_error(f"{path} cannot be made", error) from None
    if not above.is_dir():
        raise WriteError(f"{path} cannot be made: {above} is not a folder")
    effective = os.access in os.supports_effective_ids
    if not os.access(above, os.W_OK | os.X_OK, effective_ids=effective):
        raise WriteError(f"{path} cannot be made: {above} is not open for writing")


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = True, folder: Path | None = None) -> Iterator[Path]:
    """A new file beside `path` to write to. It takes `path`'s place when the block ends.

    Whatever goes wrong inside the block, the new file is gone and `path` is as it was. Only a
    process that is killed leaves the new file (`.NAME.….part`) behind, for the next one that writes
    to `path` to remove. `durable` waits until the
    bytes are on the disk, so that not even a power cut can leave half a file. `folder`, on the same
    disk, holds the new file instead. Raises `WriteError` for whatever the system refuses, inside
    the block too.

    >>> with whole_file(Path("clip.mp4")) as temporary:  # doctest: +SKIP
    ...     encode(temporary)
    """
    place = folder or path.parent
    temporary = place / f"{_part_start(path)}{secrets.token_hex(4)}.part"
    handle = -1
    try:
        remove_abandoned(path, place)
        handle = _create_held(temporary)
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
        if handle >= 0:
            os.close(handle)


def remove_abandoned(path: Path, folder: Path | None = None) -> None:
    """Remove what killed processes left of `path` in `whole_file`: the new files nobody holds."""
    place, start = folder or path.parent, _part_start(path)
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            if name.startswith(start) and _PART.fullmatch(name, len(start)):
                _remove_unheld(place / name)


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


def read_bytes(path: Path, most: int = LARGEST_JSON) -> bytes:
    """What a regular file holds; `UnreadableError` where it is no such, or has more bytes.

    A device has no end, and a named pipe that nobody writes to no beginning. A file that is not
    there is a `FileNotFoundError`.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
            raise UnreadableError(f"{path} is not a regular file")
        with path.open("rb") as file:
            content = file.read(most + 1) if about.st_size <= most else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror or error}") from error
    size = max(len(content), about.st_size)
    if size > most:
        raise UnreadableError(
            f"{path} has {size:,} bytes; files of this kind have at most {most:,}"
        )
    return content


def read_text(path: Path, most: int) -> str:
    """As `read_bytes`, in UTF-8; the mark that some editors put before it is left out."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise UnreadableError(
            f"{path} is no text in UTF-8: byte {error.start:,} of it is {found:#04x}"
        ) from None


def read_json(path: Path, kind: str | None = None) -> dict[str, Any]:
    """The object in a file; `UnreadableError` where it is not one, or not of that kind.

    A file that is not there is a `FileNotFoundError`. With a `kind`, the object's "kind" must be
    that and its "version" 1.
    """
    try:
        value = parse_json(read_bytes(path, LARGEST_JSON))
    except UnreadableError:
        raise
    except ValueError as error:
        raise UnreadableError(f"{path} is not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise UnreadableError(f"{path} holds a {type(value).__name__}, not an object")
    if kind is not None and (value.get("kind"), value.get("version")) != (kind, 1):
        raise UnreadableError(
            f"{path} is not a {kind} file of version 1: its kind is {value.get('kind')!r:.60}, "
            f"its version {value.get('version')!r:.60}"
        )
    return value


def parse_json(text: str | bytes) -> Any:
    """The value of a text; ValueError, on one short line, where it is not JSON, or such that no
    file of ours holds: a name twice, a number that is not finite or longer than any, half a letter.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the name 'a' is given twice
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite,
            parse_int=_whole,
        )  # fmt: skip
        _check_plain(value)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(shorten(error)) from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r:.60} is given twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.60} is not finite")
    return value


def _whole(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"the number {text[:LONGEST_NUMBER]}… has {len(text):,} digits")
    return int(text)


def _check_plain(value: Any, room: int = DEEPEST_JSON) -> None:
    """A string may hold half of a letter, which no file and no terminal takes."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError(f"the text {value!r:.60} is not one that can be written")
    elif isinstance(value, dict | list):
        if not room:
            raise ValueError("it is nested too deep")
        for part in value:
            _check_plain(part, room - 1)
        for part in value.values() if isinstance(value, dict) else ():
            _check_plain(part, room - 1)


def path_inside(folder: Path, name: Any) -> Path:
    """The file of that name in a folder; ValueError where the name, or a link of that name, leads
    elsewhere, or where it could be no file's.

    >>> path_inside(Path("runs"), "../secret")
    Traceback (most recent call last):
    ValueError: '../secret' is not the name of a file in its folder
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and name.isprintable()
    if not plain or "/" in name or "\\" in name or len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"{name!r:.80} is not the name of a file in its folder")
    path = folder / name
    if path.is_symlink() and folder.resolve() not in path.resolve().parents:
        raise ValueError(f"{name!r:.80} is a link that leads out of its folder")
    return path


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


def _part_start(path: Path) -> str:
    """How the names of its unfinished files begin: cut, so that the longest name leaves room."""
    return f".{os.fsencode(path.name)[: LONGEST_NAME - 40].decode(errors='ignore')}."


def _create_held(path: Path) -> int:
    """A new file, locked as long as its handle is open: so that others see it is being written."""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        with contextlib.suppress(ImportError, OSError):  # not every system has such locks
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return handle
        os.close(handle)  # before it was locked it looked abandoned to somebody


def _remove_unheld(path: Path) -> None:
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
