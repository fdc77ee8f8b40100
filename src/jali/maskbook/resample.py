"""A book for another resolution, frame count, number of steps, or other blocks.

Tokens are places: every token of a grid covers a cell of its box, and cells of two grids overlap by
some volume. A query block of the new grid sees the mean of what the old blocks under it saw; the
mass of an old key block is dealt out to the new blocks over it. So rows still sum to 1, and a book
that is resampled to its own grid stays what it is.

Steps are places along the noise level: a new step takes the two old ones around its level. Where
only their number is given, the levels are those that the book's own schedule would have with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali.maskbook.container import FilePath
from jali.maskbook.header import LIMITS, Header
from jali.maskbook.write import write_book
from jali.tokens.grid import Box, Text, TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Order

if TYPE_CHECKING:
    from jali.maskbook.book import MaskBook

Floats = NDArray[np.float64]


def resample(
    book: MaskBook,
    grid: TokenGrid | Sequence[int] | None,
    steps: int | Sequence[float] | None,
    blocks: Blocks | None,
    output: FilePath | None,
    device: torch.device | str,
) -> MaskBook:
    """See `MaskBook.resample`."""
    old = book.header
    book.need_importance("it cannot be resampled")
    if grid is None and steps is None and blocks is None:
        raise ValueError("resample needs a grid, steps or blocks to go to")
    levels = old.noise if steps is None else _levels(old, steps)
    weights = [_around(level, old.noise) for level in levels]
    new = replace(
        old,
        grid=old.grid if grid is None else _grid(old.grid, grid),
        blocks=blocks or old.blocks,
        noise=tuple(levels),
        noise_assumed=old.noise_assumed or isinstance(steps, int),
        transformers=tuple(old.transformers[_nearest(pairs)] for pairs in weights),
        costs=(),
        importance_error=None,
        settings={},
    )
    new = replace(new, history=(*old.history, _change(old, new)))
    mean_of, dealt_to = _overlaps(old, new, device)

    def slab(step: int, layer: int) -> Tensor:
        # An expert of Wan 2.2 is never mixed with the other one.
        pairs = [(i, w) for i, w in weights[step] if old.transformers[i] == new.transformers[step]]
        total = sum(w for _, w in pairs)
        parts = [book.importance_slab(i, layer).to(device) * (w / total) for i, w in pairs]
        return mean_of @ torch.stack(parts).sum(0) @ dealt_to

    return write_book(output, new, slab, device)


def _change(old: Header, new: Header) -> str:
    changes = [
        f"{name} {getattr(old, name)} to {getattr(new, name)}"
        for name in ("grid", "steps", "blocks")
        if getattr(old, name) != getattr(new, name)
    ]
    return f"resampled: {', '.join(changes) or 'noise levels'}"


# Steps


def _levels(old: Header, steps: int | Sequence[float]) -> tuple[float, ...]:
    """The noise levels of the new steps: given, or read along the book's own curve."""
    if isinstance(steps, bool):
        raise TypeError(f"steps is a count or a list of noise levels, got {steps!r}")
    if isinstance(steps, int):
        if not 1 <= steps <= LIMITS["steps"]:
            raise ValueError(f"steps must be in 1..{LIMITS['steps']}, got {steps}")
        return tuple(schedule_like(old.noise, steps))
    levels = tuple(float(level) for level in steps)
    if not levels or not all(math.isfinite(level) for level in levels):
        raise ValueError(f"noise levels must be finite numbers, got {steps!r}")
    return levels


def schedule_like(noise: Sequence[float], steps: int) -> list[float]:
    """The levels of a schedule with another number of steps.

    Most schedules are a straight line of places u, bent by a shift s into s·u / (1 + (s − 1)·u).
    The s that straightens the known levels is found, the line is divided anew, and bent again. It
    ends at the last step, or one step behind it, whichever is nearer to no noise. A schedule of
    another kind is read between its own levels.
    """
    known = np.asarray(noise, dtype=float)
    if len(known) < 3 or known[0] <= 0:
        at = np.arange(steps) * (len(known) / steps)
        return np.interp(at, np.arange(len(known)), known).tolist()
    top = 1.0 if known[0] <= 1 else known[0]
    shift, line = _straightened(known / top)
    stride = (line[0] - line[-1]) / (len(line) - 1)
    if line[-1] < stride / 2:
        places = np.linspace(line[0], line[-1], steps)
    else:
        places = line[0] - np.arange(steps) * (stride * len(line) / steps)
    if np.abs(np.diff(line) + stride).max() > 0.1 * stride:  # no straight line after all
        at = np.linspace(0, len(known) - (line[-1] < stride / 2), steps, endpoint=False)
        return np.interp(at, np.arange(len(known)), known).tolist()
    return (top * shift * places / (1 + (shift - 1) * places)).tolist()


def _straightened(levels: Floats) -> tuple[float, Floats]:
    """The shift under which levels in 0..1 are most nearly a straight line, and that line."""
    shifts = np.geomspace(0.2, 20, 2000)[:, None]
    lines = levels / (shifts - (shifts - 1) * levels)
    length = np.maximum(lines[:, 0] - lines[:, -1], 1e-9)
    best = int((np.abs(np.diff(lines, 2)).max(1) / length).argmin())
    return float(shifts[best, 0]), lines[best]


def _around(level: float, known: Sequence[float]) -> list[tuple[int, float]]:
    """The old steps around a noise level, with weights that sum to 1."""
    if len(known) == 1:
        return [(0, 1.0)]
    order = np.argsort(known, kind="stable")
    ascending = np.asarray(known, dtype=float)[order]
    level = float(np.clip(level, ascending[0], ascending[-1]))
    right = int(np.clip(np.searchsorted(ascending, level, side="left"), 1, len(known) - 1))
    low, high = ascending[right - 1], ascending[right]
    part = 0.0 if high == low else (level - low) / (high - low)
    pairs = [(int(order[right - 1]), 1.0 - part), (int(order[right]), part)]
    return [(i, w) for i, w in pairs if w > 0]


def _nearest(pairs: list[tuple[int, float]]) -> int:
    return max(pairs, key=lambda pair: pair[1])[0]


# Tokens


def _grid(old: TokenGrid, wanted: TokenGrid | Sequence[int]) -> TokenGrid:
    """A (frames, height, width) triple replaces the one box of the old grid and leaves the text."""
    if not isinstance(wanted, TokenGrid):
        box = TokenGrid.of(tuple(wanted)).segments[0]
        boxes = sum(isinstance(segment, Box) for segment in old.segments)
        if boxes != 1:
            raise ValueError(f"the book's grid {old} has {boxes} boxes: give a whole TokenGrid")
        return TokenGrid(tuple(box if isinstance(s, Box) else s for s in old.segments))
    if [type(s) for s in wanted.segments] != [type(s) for s in old.segments]:
        raise ValueError(
            f"grid {wanted} is made of other segments than the book's {old}: both need the same "
            f"text and boxes, in the same order"
        )
    return wanted


def _overlaps(old: Header, new: Header, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """What importance [M, N] is multiplied with from the left and from the right.

    fp32 [M', M] whose rows sum to 1, and fp32 [N, N'] whose rows sum to 1 too.
    """
    pairs = _token_pairs(old.grid, new.grid)
    at_new, at_old, volume = (np.concatenate(column) for column in zip(*pairs, strict=True))

    def shared(new_block: int, old_block: int) -> Floats:
        """The volume that every new and every old block have in common."""
        shape = -(-new.grid.tokens // new_block), -(-old.grid.tokens // old_block)
        rows = _block_of(new.grid, new.order, new_block)[at_new]
        columns = _block_of(old.grid, old.order, old_block)[at_old]
        flat = np.bincount(rows * shape[1] + columns, volume, minlength=math.prod(shape))
        return np.asarray(flat.reshape(shape), dtype=float)

    rows, keys = shared(new.blocks.q, old.blocks.q), shared(new.blocks.k, old.blocks.k)
    mean_of = torch.from_numpy(rows / rows.sum(1, keepdims=True))
    dealt_to = torch.from_numpy(keys / keys.sum(0, keepdims=True)).T.contiguous()
    return mean_of.to(device, torch.float32), dealt_to.to(device, torch.float32)


def _block_of(grid: TokenGrid, order: Order, block: int) -> NDArray[np.int64]:
    """The block in which each token of the grid lies."""
    index = order.positions(grid)
    slot = np.arange(grid.tokens)
    if index is not None:
        slot = np.empty_like(index)
        slot[index] = np.arange(grid.tokens)
    return slot // block


def _token_pairs(
    old: TokenGrid, new: TokenGrid
) -> list[tuple[NDArray[np.int64], NDArray[np.int64], Floats]]:
    """For every segment: (new token, old token, volume they share) of all tokens that overlap.

    A segment has the volume of its old tokens, so that segments keep their weight.
    """
    found = []
    for (old_start, a), (new_start, b) in zip(old.spans(), new.spans(), strict=True):
        old_shape = (1, 1, a.tokens) if isinstance(a, Text) else a.shape
        new_shape = (1, 1, b.tokens) if isinstance(b, Text) else b.shape
        axes = [_axis_pairs(n, m) for n, m in zip(old_shape, new_shape, strict=True)]
        (t1, t0, tv), (h1, h0, hv), (w1, w0, wv) = axes
        volume = tv[:, None, None] * hv[None, :, None] * wv[None, None, :]
        at_new = np.add.outer(np.add.outer(t1 * new_shape[1], h1) * new_shape[2], w1)
        at_old = np.add.outer(np.add.outer(t0 * old_shape[1], h0) * old_shape[2], w0)
        found.append((new_start + at_new.ravel(), old_start + at_old.ravel(), volume.ravel()))
    return found


def _axis_pairs(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Cells of two even divisions of one length that overlap: (new, old, length in old cells)."""
    # In units of 1 / (old · new) every border is a whole number.
    borders = np.union1d(np.arange(old + 1) * new, np.arange(new + 1) * old)
    start, length = borders[:-1], np.diff(borders)
    return start // old, start // new, length / new
