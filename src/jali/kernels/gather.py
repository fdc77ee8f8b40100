"""Reordering tokens at memory speed: one gather of whole token rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, TensorSpec
from .score_tiles import cdiv, power_of_two


@triton.jit
def _copy_rows(
    x, index,
    out,  # [B, rows, pieces * width] contiguous
    rows, pieces, width, x_b, x_s, x_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def _gather_rows_kernel(
    x, index, out, rows, pieces, width, x_b, x_s, x_p, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    _copy_rows(x, index, out, rows, pieces, width, x_b, x_s, x_p, ROWS, COLUMNS)


@triton.jit
def _gather_three_kernel(
    q, k, v, index, out,  # [3, B, rows, pieces * width] contiguous
    rows, pieces, width, q_b, q_s, q_p, k_b, k_s, k_p, v_b, v_s, v_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(2)
    each = tl.num_programs(1).to(tl.int64) * rows * pieces * width
    if which == 0:
        _copy_rows(q, index, out, rows, pieces, width, q_b, q_s, q_p, ROWS, COLUMNS)
    elif which == 1:
        _copy_rows(k, index, out + each, rows, pieces, width, k_b, k_s, k_p, ROWS, COLUMNS)
    else:
        _copy_rows(v, index, out + 2 * each, rows, pieces, width, v_b, v_s, v_p, ROWS, COLUMNS)


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
    shape, launch = _launch(x.shape, (x.stride(),), index.shape, rows, columns, warps)
    out = torch.empty(*shape, dtype=x.dtype, device=x.device)
    launch(x, index.contiguous(), out)
    return out.transpose(1, 2)


def gather_each(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, rows: int | None = None, columns: int = 512
) -> tuple[Tensor, ...]:
    """`gather_rows` of all three; where they have one shape, in one launch and one memory."""
    shapes, strides = (q.shape, k.shape, v.shape), (q.stride(), k.stride(), v.stride())
    call = _together(shapes, strides, q.dtype, q.device, index.shape, rows, columns)
    if call is None:
        return tuple(gather_rows(x, index, rows=rows, columns=columns) for x in (q, k, v))
    out = torch.empty(*call.shape, dtype=q.dtype, device=q.device)
    call.launch(q, k, v, index.contiguous(), out)
    made: tuple[Tensor, ...] = out.transpose(2, 3).unbind()
    for x in made:
        x.jali_spec = call.each  # type: ignore[attr-defined]
    return made


class _Together(NamedTuple):
    """What of gathering three follows from their shapes: that of the result in memory, what writes
    it, and what each of the three is there."""

    shape: tuple[int, ...]
    launch: Launch
    each: TensorSpec


@functools.lru_cache(maxsize=256)
def _together(
    shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...], dtype: torch.dtype,
    device: torch.device, index: tuple[int, ...], rows: int | None, columns: int,
) -> _Together | None:  # fmt: skip
    if len(set(shapes)) > 1:
        return None
    shape, launch = _launch(shapes[0], strides, index, rows, columns, 4)
    batch, length, heads, dim = shape
    row = heads * dim
    each = TensorSpec(
        (batch, heads, length, dim), (length * row, dim, row, 1), dtype, device,
        batch * length * row * dtype.itemsize % 16 == 0,
    )  # fmt: skip
    return _Together((3, *shape), launch, each)


@functools.lru_cache(maxsize=256)
def _launch(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], index: tuple[int, ...],
    rows: int | None, columns: int, warps: int,
) -> tuple[tuple[int, ...], Launch]:  # fmt: skip
    """The shape of a result in memory and what writes it, for one tensor or for three."""
    if len(shape) != 4 or any(stride[3] != 1 for stride in strides) or len(index) != 1:
        raise ValueError("need [B, H, S, D] with a contiguous last dim and index [S']")
    batch, heads, _, dim = shape
    length = index[0]
    merged = heads == 1 or all(stride[1] == dim for stride in strides)
    pieces, width = (1, heads * dim) if merged else (heads, dim)
    columns = min(columns, power_of_two(width))
    rows = rows or max(1, 4096 // columns)
    grid = (cdiv(length, rows) * pieces * cdiv(width, columns), batch, len(strides))
    steps = (n for stride in strides for n in (stride[0], stride[2], stride[1]))
    constants = {"ROWS": rows, "COLUMNS": columns, "num_warps": warps}
    kernel = _gather_rows_kernel if len(strides) == 1 else _gather_three_kernel
    launch = Launch(kernel, grid, (length, pieces, width, *steps), constants)
    return (batch, length, heads, dim), launch
