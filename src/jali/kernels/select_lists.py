"""From scores to ascending block lists: exact top-k per row with forced blocks and full rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.lists import StackedLists, StackedListsSpec

from .launch import Launch
from .score_tiles import power_of_two
from .select_rank import HIGHEST, cut_of, ordered_keys, running_count


@triton.jit
def _select_lists_kernel(
    scores, keep, forced, full_rows, counts, indices, m, n, width, keep_slot, keep_row,
    N_PAD: tl.constexpr, W_PAD: tl.constexpr, HAS_FORCED: tl.constexpr, HAS_FULL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.program_id(1)
    column = tl.arange(0, N_PAD)
    real = column < n
    line = slot.to(tl.int64) * m + row
    key = ordered_keys(tl.load(scores + line * n + column, mask=real, other=float("nan")))
    k = tl.maximum(tl.load(keep + slot * keep_slot + row * keep_row), 1)
    if HAS_FORCED:
        must = tl.load(forced + row * n + column, mask=real, other=0) != 0
        key = tl.where(must, HIGHEST, key)
        k = tl.maximum(k, tl.sum(must.to(tl.int32), 0))
    if HAS_FULL:
        k = tl.where(tl.load(full_rows + row) != 0, n, k)
    k = tl.minimum(k, n)
    cut, exact = cut_of(key, real, k)
    chosen = key > cut
    if not exact:  # the first of those that tie at the cut belong too
        ties = k - tl.sum(chosen.to(tl.int32), 0)
        chosen |= real & (key == cut) & (running_count(key == cut, N_PAD) <= ties)
    place = running_count(chosen, N_PAD) - 1
    k = tl.minimum(k, width)
    tl.store(counts + line, k)
    tl.store(indices + line * width + place, column, mask=chosen & (place < width))
    # What lies behind the count is never read, but stays a valid index whoever reads it.
    rest = tl.arange(0, W_PAD)
    tl.store(indices + line * width + rest, 0, mask=(rest >= k) & (rest < width))


def select_lists(
    scores: Tensor,
    keep: Tensor,
    forced: Tensor | None = None,
    full_rows: Tensor | None = None,
    width: int | None = None,
    *,
    warps: int | None = None,
    registers: int = 112,
) -> tuple[Tensor, Tensor]:
    """The `keep` best key blocks of every row, ascending.

    scores [B,H,M,N] fp32 (N <= 4096; NaN ranks last), keep int32 [], [B,H] or [B,H,M]. `forced`
    bool/uint8 [M,N] blocks come first and count inside `keep`; a row with more of them keeps them
    all. `full_rows` bool/uint8 [M] read every block. Equal scores go to the lower index. Returns
    counts int32 [B,H,M], at least 1, and indices int32 [B,H,M,W] with W = `width` or N: entries
    behind the count are 0. A `width` below a row's count cuts the row short. `warps` and
    `registers` (per thread) tune speed only.
    """
    shape, launch = _lists_launch(
        scores.shape, keep.dim(), width, forced is not None, full_rows is not None, warps,
        registers,
    )  # fmt: skip
    device = scores.device
    counts = torch.empty(*shape[:3], dtype=torch.int32, device=device)
    indices = torch.empty(*shape, dtype=torch.int32, device=device)
    launch(
        scores.contiguous(), keep.contiguous(), None if forced is None else forced.contiguous(),
        None if full_rows is None else full_rows.contiguous(), counts, indices,
    )  # fmt: skip
    return counts, indices


@functools.lru_cache(maxsize=256)
def _lists_launch(
    shape: tuple[int, ...], keep_dims: int, width: int | None, has_forced: bool, has_full: bool,
    warps: int | None, registers: int,
) -> tuple[tuple[int, ...], Launch]:  # fmt: skip
    """The indices' shape and what writes them."""
    batch, heads, m, n = shape
    if n > 4096:
        raise ValueError(f"rows of at most 4096 key blocks, got {n}")
    width = n if width is None else max(1, min(width, n))
    n_pad = power_of_two(n)
    constants = {
        "N_PAD": n_pad,
        "W_PAD": power_of_two(width),
        "HAS_FORCED": has_forced,
        "HAS_FULL": has_full,
        **row_options(n_pad, warps, registers),
    }
    # How far the next head's and the next row's count is: one for all, per head, or per row.
    steps = {0: (0, 0), 2: (1, 0), 3: (m, 1)}[keep_dims]
    numbers = (m, n, width, *steps)
    launch = Launch(_select_lists_kernel, (m, batch * heads), numbers, constants)
    return (batch, heads, m, width), launch


@triton.jit
def store_lists(
    level,  # int32 [N_PAD], 0 beyond n
    counts,  # int32 [COUNT, lines]
    indices,  # int32 [COUNT, lines, n]
    line, lines, n,
    RATIOS: tl.constexpr,  # one byte per ratio, first ratio lowest
    COUNT: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    """The blocks of one row that are read at each ratio, ascending, and zeros behind them."""
    column = tl.arange(0, N_PAD)
    for index in tl.static_range(COUNT):
        chosen = level == (RATIOS >> (8 * index)) & 0xFF
        place = running_count(chosen, N_PAD) - 1
        count = tl.sum(chosen.to(tl.int32), 0)
        at = index * lines + line
        tl.store(counts + at, count)
        tl.store(indices + at * n + place, column, mask=chosen)
        tl.store(indices + at * n + column, 0, mask=(column >= count) & (column < n))


@triton.jit
def _level_lists_kernel(
    levels, counts, indices, n, RATIOS: tl.constexpr, COUNT: tl.constexpr, N_PAD: tl.constexpr
):
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N_PAD)
    level = tl.load(levels + line * n + column, mask=column < n, other=0).to(tl.int32)
    lines = tl.num_programs(0).to(tl.int64)
    store_lists(level, counts, indices, line, lines, n, RATIOS, COUNT, N_PAD)


def packed_ratios(ratios: Sequence[int]) -> int:
    """Ratios as one constant: a byte each, the first one lowest."""
    return sum(ratio << (8 * i) for i, ratio in enumerate(ratios))


def level_lists(levels: Tensor, ratios: Sequence[int], *, warps: int | None = None) -> StackedLists:
    """The blocks read at each of `ratios` (1 to 7, all above 0), ascending, in one launch.

    levels uint8 [B,H,M,N] -> per ratio counts int32 [B,H,M] and indices int32 [B,H,M,N]; entries
    behind the count are 0. A count may be 0.
    """
    launch = _levels_launch(levels.shape, tuple(ratios), warps)
    shape = len(ratios), *levels.shape
    counts = torch.empty(*shape[:4], dtype=torch.int32, device=levels.device)
    indices = torch.empty(*shape, dtype=torch.int32, device=levels.device)
    launch(levels.contiguous(), counts, indices)
    return StackedLists(StackedListsSpec(tuple(ratios), shape), counts, indices)


@functools.lru_cache(maxsize=256)
def _levels_launch(shape: tuple[int, ...], ratios: tuple[int, ...], warps: int | None) -> Launch:
    if not 1 <= len(ratios) <= 7 or min(ratios) < 1:
        raise ValueError(f"1 to 7 ratios of at least 1, got {ratios}")
    n = shape[3]
    n_pad = power_of_two(n)
    constants = {
        "RATIOS": packed_ratios(ratios),
        "COUNT": len(ratios),
        "N_PAD": n_pad,
        **row_options(n_pad, warps),
    }
    return Launch(_level_lists_kernel, (shape[0] * shape[1] * shape[2],), (n,), constants)


def row_options(n_pad: int, warps: int | None, registers: int | None = None) -> dict[str, int]:
    """Launch options of kernels that hold one row per program.

    One warp per row avoids barriers as long as a row fits its registers; a cap on those, where the
    row leaves room for it, keeps enough rows on a multiprocessor to hide each other's waits.
    """
    options = {"num_warps": warps or max(1, n_pad // 1024)}
    if registers is None and n_pad <= 512:
        registers = 128
    return options if registers is None else {**options, "maxnreg": registers}
