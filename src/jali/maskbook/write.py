"""Writing a book: slab by slab, so that its size does not matter."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali.maskbook import quantization
from jali.maskbook.book import KIND, MaskBook, checksum, digest
from jali.maskbook.container import Writer, replacing
from jali.maskbook.derive import keep_bits
from jali.maskbook.header import Header
from jali.planning.budget import Budget
from jali.tokens.layout import block_layout

# (step, layer) -> importance fp32 [branches, H, M, N], on any device.
Slabs = Callable[[int, int], Tensor]
Progress = Callable[[int, int], None]


def write_book(
    output: str | os.PathLike[str] | None,
    header: Header,
    slabs: Slabs,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    scratch: Path | None = None,
) -> MaskBook:
    """Make a book of importance: the 8-bit form of it, and the bits of every budget.

    The bits come from `slabs` as they are, not from their 8-bit form. The file gets its name when
    it is complete; until then, and if anything fails, an older one stays as it was.
    """
    if output is not None:
        with replacing(output, scratch) as file:
            _fill(file, header, slabs, device, progress)
        return MaskBook.open(output)
    handle, name = tempfile.mkstemp(prefix="jali-book-", suffix=".safetensors")
    try:
        with os.fdopen(handle, "r+b") as file:
            _fill(file, header, slabs, device, progress)
        book = MaskBook.open(name)
    finally:
        os.unlink(name)  # the mapping keeps what it maps
    book.path = None
    return book


def _fill(
    file: BinaryIO, header: Header, slabs: Slabs, device: torch.device | str,
    progress: Progress | None,
) -> None:  # fmt: skip
    # As long as it can get, so that the space for it is reserved.
    header = replace(header, costs=(0.1234567890123456,) * len(header.budgets))
    if header.importance:
        header = replace(header, importance_error=0.01234567890123456)
    entries = header.tensors()
    writer = Writer(file, entries, words=len(header.text()) + 200)
    sizes = {entry.name: entry.bytes for entry in entries}
    per_slab = {name: sizes[name] // (header.steps * header.layers) for name in header.checked}
    budgets = [Budget(mean) for mean in header.budgets]
    outer = (header.steps, header.layers)
    costs = np.zeros((len(budgets), *outer, *header.slab[:2]), dtype=np.float32)
    checks = np.zeros((len(header.checked), *outer), dtype=np.uint32)
    layout = block_layout(header.grid, None, header.order, header.blocks, None, device)
    worst = 0.0
    for step in range(header.steps):
        for layer in range(header.layers):
            x = slabs(step, layer).to(device, torch.float32)
            _check_slab(x, header, step, layer)
            place = step * header.layers + layer
            for i, budget in enumerate(budgets):
                made = [keep_bits(part, layout, budget, header.sharpness) for part in x]
                bits = torch.stack([bits for bits, _ in made]).cpu().numpy()
                costs[i, step, layer] = torch.stack([cost for _, cost in made]).cpu().numpy()
                writer.put(f"bits.{i}", bits, place * per_slab[f"bits.{i}"])
                checks[i, step, layer] = checksum(bits)
            if header.importance:
                codes, peaks = quantization.quantize(x)
                worst = max(worst, _error(x, codes, peaks))
                raw, top = codes.cpu().numpy(), peaks.cpu().numpy()
                writer.put("importance", raw, place * per_slab["importance"])
                writer.put("peaks", top, place * top.nbytes)
                checks[-1, step, layer] = checksum(raw, top)
        if progress is not None:
            progress(step + 1, header.steps)
    tables: list[NDArray[Any]] = [*costs, checks]
    for i, table in enumerate(costs):
        writer.put(f"costs.{i}", table)
    writer.put("checks", checks)
    if "filler" in sizes:
        filler = np.zeros(sizes["filler"], dtype=np.uint8)
        writer.put("filler", filler)
        tables.append(filler)
    header = replace(
        header,
        costs=tuple(float(table.mean(dtype=np.float64)) for table in costs),
        importance_error=worst if header.importance else None,
    )
    places = {entry.name: entry.plain() for entry in entries}
    words = {"format": KIND, "book": header.text(), "digest": digest(header, places, tables)}
    writer.close(words)


def _check_slab(x: Tensor, header: Header, step: int, layer: int) -> None:
    if tuple(x.shape) != header.slab:
        raise ValueError(f"importance must be {list(header.slab)}, got {list(x.shape)}")
    if not bool(((x >= 0) & x.isfinite()).all()):
        raise ValueError(
            f"the importance of step {step}, layer {layer} is not finite and >= 0 everywhere"
        )


def _error(x: Tensor, codes: Tensor, peaks: Tensor) -> float:
    """The largest relative error of the values that the code can hold."""
    held = x > peaks[..., None] * 2.0**-quantization.OCTAVES
    off = (quantization.dequantize(codes, peaks) - x).abs() / x.clamp_min(torch.finfo(x.dtype).tiny)
    return float(off[held].max()) if bool(held.any()) else 0.0
