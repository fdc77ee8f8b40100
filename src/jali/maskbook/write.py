"""Writing a book: slab by slab, so that its size does not matter."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali import files
from jali.maskbook.bits import keep_bits
from jali.maskbook.book import KIND, MaskBook
from jali.maskbook.container import (
    ContainerWriter,
    FilePath,
    book_digest,
    checksum,
    data_end,
    data_start,
)
from jali.maskbook.header import Header
from jali.maskbook.quantization import OCTAVES, dequantize, quantize
from jali.planning.budget import Budget
from jali.planning.distortion import encode
from jali.tokens.layout import block_layout

# (step, layer) -> importance fp32 [branches, H, M, N], or (place, layer) -> errors of rd
# [branches, H, M, N, L]; on any device.
Slabs = Callable[[int, int], Tensor]
# Above 2¹²⁷ the logarithm of an error would round to one that is infinite.
LARGEST = {"importance": torch.finfo(torch.float32).max, "errors": 2.0**127}
# (steps written, steps)
OnStep = Callable[[int, int], None]


def write_book(
    output: FilePath | None,
    header: Header,
    slabs: Slabs,
    device: torch.device | str = "cpu",
    on_step: OnStep | None = None,
    scratch: Path | None = None,
) -> MaskBook:
    """Make a book of importance: the 8-bit form of it, and the bits of every budget. Or of the
    errors of rd, where the header says so.

    Args:
        output: the file, which gets its name when it is complete; until then, and if anything
            fails, an older one stays as it was. None: a book without a name, gone when closed.
        header: what the book says of itself; its costs and the error of the 8 bits are filled in.
        slabs: `slabs(step, layer)` is the importance fp32 [branches, H, M, N] there, on any
            device. The bits come from it as it is, not from its 8-bit form.
        device: where bits are made.
        on_step: called with (steps written, steps).
        scratch: a folder of the same disk where the unfinished file lies; none: beside `output`.

    Raises:
        ValueError: importance of another shape, negative or not finite; its place is named.
        OSError: the disk is full (said before any work) or the place cannot be written.
    """
    if output is not None:
        path = Path(output)
        check_output(path)
        with files.whole_file(path, folder=scratch) as temporary:
            _write(temporary, header, slabs, device, on_step)
        return MaskBook.open(path)
    with tempfile.TemporaryDirectory(prefix="jali-book-") as folder:
        path = Path(folder) / "book.safetensors"
        path.touch()
        _write(path, header, slabs, device, on_step)
        book = MaskBook.open(path)
    book.path = None  # the mapping keeps what it maps
    return book


def check_output(output: Path) -> None:
    """Can the book be written there?"""
    if output.suffix.lower() in files.PICKLES:
        raise ValueError(
            f"a book is a .safetensors file, never a pickle: use "
            f"{output.with_suffix('.safetensors')}"
        )
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file in it")
    files.make_folder(output.parent)
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"{output.parent} cannot be written to")


def file_size(header: Header) -> int:
    """The bytes of a book with this header, before there is one."""
    tensors = header.tensors()
    return data_start(tensors, _room(header)) + data_end(tensors)


def _room(header: Header) -> int:
    """For the header in JSON in JSON, with the numbers that are known last: at most 25 characters
    each."""
    return len(json.dumps(header.text())) + 25 * (len(header.budgets) + 2) + 200


def _write(
    path: Path, header: Header, slabs: Slabs, device: torch.device | str, on_step: OnStep | None
) -> None:
    if header.errors is not None:
        _write_errors(path, header, slabs, device, on_step)
        return
    tensors, count = header.tensors(), len(header.budgets)
    layout = block_layout(header.grid, None, header.order, header.blocks, None, device)
    outer = (header.steps, header.layers)
    costs = np.zeros((count, *outer, *header.slab[:2]), dtype=np.float32)
    checks = np.zeros((len(header.checked), *outer), dtype=np.uint32)
    worst = 0.0
    with path.open("r+b") as file:
        writer = ContainerWriter(file, tensors, _room(header))
        for number, (step, layer) in enumerate(np.ndindex(outer)):
            x = slabs(step, layer).to(device, torch.float32)
            _check_slab(x, header, step, layer)
            for i, mean in enumerate(header.budgets):
                made = [keep_bits(part, layout, Budget(mean), header.sharpness) for part in x]
                bits, cost = (torch.stack(parts).cpu().numpy() for parts in zip(*made, strict=True))
                writer.put(f"bits.{i}", bits, number)
                costs[i, step, layer], checks[i, step, layer] = cost, checksum(bits)
            if header.importance:
                codes, peaks = quantize(x)
                worst = max(worst, _error(x, codes, peaks))
                raw, top = codes.cpu().numpy(), peaks.cpu().numpy()
                writer.put("importance", raw, number)
                writer.put("peaks", top, number)
                checks[-1, step, layer] = checksum(raw, top)
            if on_step is not None and layer == header.layers - 1:
                on_step(step + 1, header.steps)
        header = replace(
            header,
            costs=tuple(float(table.mean(dtype=np.float64)) for table in costs),
            importance_error=worst if header.importance else None,
        )
        tables: dict[str, NDArray[Any]] = {f"costs.{i}": table for i, table in enumerate(costs)} | {
            "checks": checks
        }
        _finish(writer, header, tables)


def _write_errors(
    path: Path, header: Header, slabs: Slabs, device: torch.device | str, on_step: OnStep | None
) -> None:
    assert header.errors is not None
    tops = np.zeros((*header.outer, *header.slab[:2]), dtype=np.float32)
    checks = np.zeros((1, *header.outer), dtype=np.uint32)
    with path.open("r+b") as file:
        writer = ContainerWriter(file, header.tensors(), _room(header))
        for number, (place, layer) in enumerate(np.ndindex(header.outer)):
            x = slabs(place, layer).to(device, torch.float32)
            _check_slab(x, header, place, layer)
            table = encode(x, header.errors.levels)
            codes = table.codes.cpu().numpy()
            writer.put("errors", codes, number)
            tops[place, layer] = table.top.cpu().numpy()
            checks[0, place, layer] = checksum(codes)
            if on_step is not None and layer == header.layers - 1:
                on_step(place + 1, header.outer[0])
        _finish(writer, header, {"tops": tops, "checks": checks})


def _finish(writer: ContainerWriter, header: Header, tables: dict[str, NDArray[Any]]) -> None:
    tensors = header.tensors()
    if "filler" in tensors:
        tables["filler"] = np.zeros(tensors["filler"]["shape"], dtype=np.uint8)
    for name, table in tables.items():
        writer.put(name, table)
    digest = book_digest(header.text(), tensors, tables.values())
    writer.finish({"format": KIND, "book": header.text(), "digest": digest})


def _check_slab(x: Tensor, header: Header, step: int, layer: int) -> None:
    what, place = ("importance", "step") if header.errors is None else ("errors", "part")
    if tuple(x.shape) != header.slab:
        raise ValueError(f"{what} must be {list(header.slab)}, got {list(x.shape)}")
    if not bool(((x >= 0) & (x <= LARGEST[what])).all()):
        raise ValueError(
            f"the {what} of {place} {step}, layer {layer} is not finite and >= 0 everywhere"
        )


def _error(x: Tensor, codes: Tensor, peaks: Tensor) -> float:
    """The largest relative error of the values that 8 bits can hold."""
    held = x > peaks[..., None] * 2.0**-OCTAVES
    off = (dequantize(codes, peaks) - x).abs() / x.clamp_min(torch.finfo(x.dtype).tiny)
    return float(off[held].max()) if bool(held.any()) else 0.0
