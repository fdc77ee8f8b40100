"""Reordering tokens at memory speed: one gather of whole token rows."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .score_tiles import cdiv, power_of_two


@triton.jit
def _gather_rows_kernel(
    x,
    index,
    out,  # [B, rows, pieces * width] contiguous
    rows,
    pieces,
    width,
    x_b,
    x_s,
    x_p,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Pieces of one token row are neighbouring programs: together they read whole memory pages.
    chunks = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // (pieces * chunks) * ROWS + tl.arange(0, ROWS)
    within = tl.program_id(0) % (pieces * chunks)
    piece = within // chunks
    column = (within % chunks) * COLUMNS + tl.arange(0, COLUMNS)
    batch = tl.program_id(1).to(tl.int64)
    token = tl.load(index + row, mask=row < rows, other=0).to(tl.int64)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    source = x + batch * x_b + piece.to(tl.int64) * x_p + token[:, None] * x_s + column[None, :]
    value = tl.load(source, mask=mask)
    line = batch * rows + row.to(tl.int64)
    target = out + (line * pieces + piece)[:, None] * width + column[None, :]
    tl.store(target, value, mask=mask)


def gather_rows(
    x: Tensor,
    index: Tensor,
    *,
    rows: int | None = None,
    columns: int = 512,
    warps: int = 4,
) -> Tensor:
    """x[:, :, index]: [B,H,S,D] -> [B,H,S',D], a view of BSHD memory, bit for bit.

    x may be any strided view with a contiguous last dim; where heads are neighbours in memory whole
    token rows are copied. `index` int32/int64 [S'] holds tokens of x and is not checked (that would
    wait for the device). Gathering with the inverse permutation restores the order.
    """
    shape, launch = _launch(x.shape, x.stride(), index.shape, rows, columns, warps)
    out = torch.empty(*shape, dtype=x.dtype, device=x.device)
    launch(x, index.contiguous(), out)
    return out.transpose(1, 2)


@functools.lru_cache(maxsize=256)
def _launch(
    shape: tuple[int, ...], stride: tuple[int, ...], index: tuple[int, ...], rows: int | None,
    columns: int, warps: int,
) -> tuple[tuple[int, ...], Launch]:  # fmt: skip
    """The result's shape in memory and what writes it."""
    if len(shape) != 4 or stride[3] != 1 or len(index) != 1:
        raise ValueError("need x [B, H, S, D] with a contiguous last dim and index [S']")
    batch, heads, _, dim = shape
    length = index[0]
    merged = heads == 1 or stride[1] == dim
    pieces, width = (1, heads * dim) if merged else (heads, dim)
    columns = min(columns, power_of_two(width))
    rows = rows or max(1, 4096 // columns)
    grid = (cdiv(length, rows) * pieces * cdiv(width, columns), batch)
    numbers = (length, pieces, width, stride[0], stride[2], stride[1])
    constants = {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    return (batch, length, heads, dim), Launch(_gather_rows_kernel, grid, numbers, constants)
