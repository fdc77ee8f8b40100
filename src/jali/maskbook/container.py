"""The file of a book: safetensors, believed only after it was checked, and never a pickle.

safetensors itself refuses a header that is cut short, cannot be parsed, or whose tensors overlap,
leave gaps or do not end with the file. It maps the file into memory, so that opening takes as long
for gigabytes as for kilobytes. What it lets pass (any dtype, any shape, a name twice) is refused
here, or where a book compares its tensors with what its own header says.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from jali import files

# The only kinds of numbers a book holds, by their safetensors names; all little-endian.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"), "U32": np.dtype("<u4"), "F32": np.dtype("<f4"),
}  # fmt: skip
HEADER_LIMIT = 8 * 2**20

Bytes = NDArray[np.uint8]
FilePath = str | os.PathLike[str]
# The header of a safetensors file: {name: {"dtype": …, "shape": […], "data_offsets": [start, end]}}
TensorTable = dict[str, dict[str, Any]]


class BookError(ValueError):
    """A file that is no book, or a broken one."""


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> TensorTable:
    """Tensors (dtype, shape) one behind the other, in the given order."""
    table: TensorTable = {}
    start = 0
    for name, (dtype, shape) in tensors.items():
        end = start + DTYPES[dtype].itemsize * math.prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    return table


@dataclass(frozen=True)
class Container:
    """An open file: its metadata, how its header describes its tensors, and the tensors."""

    metadata: Mapping[str, str]
    tensors: TensorTable
    file: Any  # safetensors' own handle
    raw: Bytes  # the whole file, mapped

    def read(self, name: str, *at: int) -> NDArray[Any]:
        """A tensor, or its part at (step, layer, …): mapped, and read only where it is used."""
        # As torch tensors: safetensors copies to numpy, and holds up all threads meanwhile.
        found = self.file.get_slice(name)[at] if at else self.file.get_tensor(name)
        array: NDArray[Any] = found.numpy()
        array.flags.writeable = False
        return array


def open_container(path: Path) -> Container:
    """Check and map a file. Every refusal is a BookError that says what is wrong with it."""
    if path.suffix.lower() in files.PICKLES:
        then = f"--model NAME --output {path.with_suffix('.safetensors')}"
        raise BookError(
            f"{path} is a {path.suffix} file, which may hold a pickle, and opening a pickle can "
            f"run any program; a book is never one. Make a book of ESA's masks with: jali book "
            f"import {path} {then}, or record one anew with: jali calibrate {then}"
        )
    if not path.exists():
        raise FileNotFoundError(f"no book at {path}; make one with jali calibrate --output {path}")
    if not path.is_file():  # opening a named pipe would wait for a writer
        raise BookError(f"{path} is not a regular file")
    with path.open("rb") as file:
        first = file.read(8)
        if first[:2] == b"PK" or first[:1] == b"\x80":
            raise BookError(
                f"{path} is a pickle or a zip archive, whatever its name, and no book. Of masks of "
                f"ESA's jali book import makes one; jali calibrate records one anew"
            )
        length = int.from_bytes(first, "little")
        if length > HEADER_LIMIT:
            raise BookError(
                f"{path} says that its header has {length} bytes; a book's has at most "
                f"{HEADER_LIMIT}"
            )
        text = file.read(length)
    try:
        opened = safe_open(path, "pt")
        tensors = json.loads(text.decode(), object_pairs_hook=unique)
    except (SafetensorError, ValueError) as error:
        raise BookError(
            f"{path} is no safetensors file, or was cut short or changed: {error}"
        ) from None
    metadata = tensors.pop("__metadata__", None) or {}
    return Container(metadata, tensors, opened, np.memmap(path, np.uint8, "r"))


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of JSON in which no name occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return found


class ContainerWriter:
    """A file being written: tensors in any order and in parts, the metadata last.

    safetensors writes whole tensors from memory. A book may be larger than that, and is made layer
    by layer: so its space is reserved, which a full disk refuses before any work, and filled.
    `room` is for the metadata, whose numbers are known last: at most so many bytes of JSON.
    """

    def __init__(self, file: BinaryIO, tensors: TensorTable, room: int) -> None:
        self._file, self._tensors = file, tensors
        self._data = data_start(tensors, room)
        reserve(file, self._data + data_end(tensors))

    def put(self, name: str, array: NDArray[Any], number: int = 0) -> None:
        """Write part `number` of a tensor that is made of arrays of this size."""
        tensor = self._tensors[name]
        part = np.ascontiguousarray(array, DTYPES[tensor["dtype"]])
        start, end = tensor["data_offsets"]
        start += number * part.nbytes
        if start + part.nbytes > end:
            raise ValueError(f"part {number} of {part.nbytes} bytes lies behind the end of {name}")
        self._file.seek(self._data + start)
        self._file.write(part.data)

    def finish(self, metadata: Mapping[str, str]) -> None:
        text = _header(metadata, self._tensors)
        length = self._data - 8
        if len(text) > length:
            raise ValueError(f"the header has {len(text)} bytes, more than was left for it")
        self._file.seek(0)
        self._file.write(length.to_bytes(8, "little") + text.ljust(length))


def data_start(tensors: TensorTable, room: int) -> int:
    """Where the tensors begin in a file with so much room for its metadata."""
    return -(-(8 + len(_header({}, tensors)) + room) // 4096) * 4096


def data_end(tensors: TensorTable) -> int:
    """The bytes of all tensors."""
    return max(int(tensor["data_offsets"][1]) for tensor in tensors.values())


def _header(metadata: Mapping[str, str], tensors: TensorTable) -> bytes:
    return json.dumps({"__metadata__": dict(metadata), **tensors}, separators=(",", ":")).encode()


def reserve(file: BinaryIO, size: int) -> None:
    """Take the space now: a full disk is said here, not in the middle of the work."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {size:,} bytes are needed") from error


def checksum(*parts: NDArray[Any]) -> int:
    """CRC-32 over arrays, one behind the other."""
    value = 0
    for part in parts:
        value = zlib.crc32(np.ascontiguousarray(part).data, value)
    return value


def book_digest(header: str, tensors: TensorTable, tables: Iterable[NDArray[Any]]) -> str:
    """SHA-256 over the header of a book, where its tensors lie, and its small tables."""
    found = hashlib.sha256(f"{header}{files.canonical(tensors)}".encode())
    for table in tables:
        found.update(np.ascontiguousarray(table).data)
    return found.hexdigest()
