"""The container of a book: a safetensors file, read by strict rules and written in one piece.

Nothing of a file is believed before it is checked: how long the header is, what it may hold, and
that the tensors lie one behind the other from the first byte of the data to the last. Only then is
the file mapped into memory. There is no pickle anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

# The only kinds of numbers a book holds, by their safetensors names; all little-endian.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"), "U32": np.dtype("<u4"), "F32": np.dtype("<f4"),
}  # fmt: skip
HEADER_LIMIT = 8 * 2**20
TENSOR_LIMIT = 256
NUMBER_LIMIT = 2**62
PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")

Bytes = NDArray[np.uint8]


class BookError(ValueError):
    """A file that is no book, or a broken one."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a container: what it holds and where it lies in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        size = DTYPES[self.dtype].itemsize
        for n in self.shape:
            size *= n
        return size

    @property
    def end(self) -> int:
        return self.start + self.bytes

    def plain(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data_offsets": [self.start, self.end],
        }


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[Entry, ...]:
    """Tensors one behind the other, in the given order."""
    entries, start = [], 0
    for name, (dtype, shape) in tensors.items():
        entries.append(Entry(name, dtype, shape, start))
        start = entries[-1].end
    return tuple(entries)


@dataclass(frozen=True)
class Container:
    """A checked file: its words, its tensors, and the whole of it mapped into memory."""

    name: str
    words: Mapping[str, str]
    entries: Mapping[str, Entry]
    data_start: int
    mapped: Bytes

    def tensor(self, name: str) -> NDArray[Any]:
        """A view into the file; nothing is read before it is used."""
        entry = self.entries[name]
        raw = self.mapped[self.data_start + entry.start : self.data_start + entry.end]
        return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def read_container(path: str | os.PathLike[str]) -> Container:
    """Check and map a file. Every refusal is a BookError that says what is wrong with it."""
    path = Path(path)
    _refuse_pickle(path)
    try:
        # Not blocking: opening a named pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no book at {path}; make one with jali calibrate --output {path}"
        ) from None
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise BookError(f"{path} is not a regular file")
        words, entries, data_start = _read_header(file, facts.st_size, str(path))
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
    return Container(str(path), words, entries, data_start, mapped)


def _refuse_pickle(path: Path) -> None:
    if path.suffix.lower() in PICKLES:
        raise BookError(
            f"{path} is a {path.suffix} file, which may hold a pickle, and opening a pickle can "
            f"run any program; jali never opens one. Calibrate again: jali calibrate --model NAME "
            f"--output {path.with_suffix('.safetensors')}"
        )


def _read_header(
    file: BinaryIO, size: int, name: str
) -> tuple[dict[str, str], dict[str, Entry], int]:
    if size < 10:
        raise BookError(f"{name} has {size} bytes, too few for a book; it may be cut short")
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if first[:2] == b"PK" or first[:1] == b"\x80":
        raise BookError(
            f"{name} is a pickle or a zip archive, whatever its name; jali never opens those. "
            f"Calibrate again with jali calibrate"
        )
    if length > HEADER_LIMIT:
        raise BookError(
            f"{name} says that its header has {length} bytes; a book's has at most {HEADER_LIMIT}"
        )
    if 8 + length > size:
        raise BookError(
            f"{name} has {size} bytes, but its header alone would end at {8 + length}: cut short"
        )
    header = _parse(file.read(length), name)
    words = header.pop("__metadata__", {})
    if not isinstance(words, dict) or not all(isinstance(x, str) for x in words.values()):
        raise BookError(f"{name}: __metadata__ must map names to texts")
    if len(header) > TENSOR_LIMIT:
        raise BookError(f"{name} names {len(header)} tensors; a book has at most {TENSOR_LIMIT}")
    entries = {key: _entry(key, value, name) for key, value in header.items()}
    _check_order(entries.values(), size - 8 - length, name)
    return words, entries, 8 + length


def _parse(text: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    def refuse(value: str) -> None:
        raise ValueError(f"{value} is no number")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        what = "nested too deep" if isinstance(error, RecursionError) else error
        raise BookError(f"the header of {name} cannot be read: {what}") from None
    if not isinstance(header, dict):
        raise BookError(f"the header of {name} is not a mapping")
    return header


def _entry(key: str, value: Any, name: str) -> Entry:
    place = f"{name}: tensor {key!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise BookError(f"{place} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BookError(f"{place} is of dtype {dtype!r}; a book holds {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_size, shape)):
        raise BookError(f"{place} has the shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise BookError(f"{place} has the offsets {str(offsets)[:80]}")
    entry = Entry(key, dtype, tuple(shape), offsets[0])
    if entry.end != offsets[1]:
        raise BookError(
            f"{place} of {dtype} {shape} needs {entry.bytes} bytes, but its offsets {offsets} hold "
            f"{offsets[1] - offsets[0]}"
        )
    return entry


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUMBER_LIMIT


def _check_order(entries: Any, data: int, name: str) -> None:
    """The tensors must fill the data without gaps and without overlaps."""
    at = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != at:
            what = "overlaps what lies before it" if entry.start < at else "leaves a gap"
            raise BookError(f"{name}: tensor {entry.name!r} starts at {entry.start} and {what}")
        at = entry.end
    if at != data:
        raise BookError(
            f"{name} holds {data} bytes of tensors, but its header describes {at}: "
            f"{'cut short' if data < at else 'something was added'}"
        )


class Writer:
    """A container being written: tensors in any order, the words last.

    The space is asked for at the start, so that a full disk says so before any work, and what is
    written lies under another name until it is complete.
    """

    def __init__(self, file: BinaryIO, entries: tuple[Entry, ...], words: int) -> None:
        self._file = file
        self._entries = {entry.name: entry for entry in entries}
        # Room for the words in the form JSON gives them: at worst six characters for one.
        reserved = len(self._text({})) + 6 * words + 64
        self._data = -(-(8 + reserved) // 4096) * 4096
        total = entries[-1].end if entries else 0
        reserve(file, self._data + total)

    def put(self, name: str, array: NDArray[Any], at: int = 0) -> None:
        """Write an array, `at` bytes behind the start of a tensor."""
        entry = self._entries[name]
        raw = np.ascontiguousarray(array, DTYPES[entry.dtype])
        if at < 0 or at + raw.nbytes > entry.bytes:
            raise ValueError(f"{raw.nbytes} bytes at {at} do not fit {name} of {entry.bytes}")
        self._file.seek(self._data + entry.start + at)
        self._file.write(raw.tobytes() if raw.ndim == 0 else raw.reshape(-1).view(np.uint8).data)

    def close(self, words: Mapping[str, str]) -> None:
        text = self._text(words)
        if 8 + len(text) > self._data:
            raise ValueError(f"the header has {len(text)} bytes, more than was left for it")
        length = self._data - 8
        self._file.seek(0)
        self._file.write(length.to_bytes(8, "little") + text.ljust(length))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _text(self, words: Mapping[str, str]) -> bytes:
        tensors = {name: entry.plain() for name, entry in self._entries.items()}
        return json.dumps({"__metadata__": dict(words), **tensors}, separators=(",", ":")).encode()


def reserve(file: BinaryIO, size: int) -> None:
    """Take the space now: a full disk is said here, not in the middle of the work."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {size:,} bytes are needed") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], scratch: Path | None = None) -> Iterator[BinaryIO]:
    """A new file that takes its name when the block is over; whatever fails, the old one stays.

    Until then it lies beside it, or in `scratch`, a folder of the same disk.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        dir=scratch or path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(handle, "r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """A new name survives a power cut once its folder is on disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
