"""Levels by one price of work: what every price saves, and the lists of what is best at one.

Blocks hold their errors as bytes, see `planning.distortion.ErrorTable`. Nothing of the size of the
errors is ever written: the first kernel adds up by price what coarser levels save, the second reads
the bytes again and lists each block at the level whose error + price · work is least.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.lists import StackedLists, StackedListsSpec

from .launch import Launch
from .score_tiles import cdiv, power_of_two
from .select_lists import packed_ratios, row_options, store_lists

_MOST = 8  # levels, reading in full among them
_INFINITE = tl.constexpr(float("inf"))
_COLUMNS = 128


@triton.jit
def _error_of(
    codes, tops, spread, mixed, line, slot, row, column, n, per_octave,
    LEVEL: tl.constexpr,  # 0 reads in full and errs nothing
    POOLED: tl.constexpr,  # a bit for every level that reads means
    LEVELS: tl.constexpr, HAS_MIXED: tl.constexpr,
):  # fmt: skip
    """Errors of one level, infinite where it cannot be. [columns]."""
    real = column < n
    code = tl.load(
        codes + (line * n + column) * LEVELS + LEVEL - 1, mask=real & (LEVEL > 0), other=0
    )
    power = (code.to(tl.float32) - 255) / per_octave + tl.load(tops + slot)
    factor = tl.load(spread + row * n + column, mask=real, other=1.0)
    error = tl.where(code == 0, 0.0, tl.exp2(power)) * factor
    if HAS_MIXED and (POOLED >> LEVEL) & 1 != 0:
        both = tl.load(mixed + column, mask=real, other=0) != 0
        error = tl.where(both, _INFINITE, error)
    return error


@triton.jit
def _work_of(work, batch, work_b, column, n, LEVEL: tl.constexpr, LEVELS: tl.constexpr):
    """Of one level. [columns]."""
    at = batch * work_b + column * (1 + LEVELS) + LEVEL
    return tl.load(work + at, mask=column < n, other=0)


@triton.jit
def _turn(
    error, cost, codes, tops, spread, mixed, work, line, slot, row, batch, work_b, column, n,
    per_octave, OTHER: tl.constexpr, COARSER: tl.constexpr, POOLED: tl.constexpr,
    LEVELS: tl.constexpr, HAS_MIXED: tl.constexpr,
):  # fmt: skip
    """The price at which a level errs and costs as much as another. [columns]."""
    other = _error_of(
        codes, tops, spread, mixed, line, slot, row, column, n, per_octave, OTHER, POOLED, LEVELS,
        HAS_MIXED,
    )  # fmt: skip
    less = cost - _work_of(work, batch, work_b, column, n, OTHER, LEVELS)
    turn = (other - error) / less if COARSER else (error - other) / -less
    return tl.where(turn == turn, turn, _INFINITE)


@triton.jit
def _saved_kernel(
    codes, tops, spread, mixed, fixed,
    work,  # fp32 [B or 1, n, 1 + LEVELS]
    units,  # int64, the same in whole numbers
    row_sizes,  # int64 [m]; 0 for rows that do not count
    saved,  # int64 [B, bins]
    heads, m, n, work_b, bins, per_octave, first_octave, per_price_octave,
    POOLED: tl.constexpr, LEVELS: tl.constexpr, HAS_MIXED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # A thread has a column and looks at its levels one after the other: nothing is exchanged.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1)
    slot = tl.program_id(2)
    batch = slot // heads
    line = slot.to(tl.int64) * m + row
    free = tl.load(fixed + row * n + column, mask=column < n, other=1) == 0
    size = tl.load(row_sizes + row)
    before = _work_of(units, batch, work_b, column, n, 0, LEVELS)
    at_once = tl.zeros([COLUMNS], tl.int64)
    for level in tl.static_range(1, LEVELS + 1):
        error = _error_of(
            codes, tops, spread, mixed, line, slot, row, column, n, per_octave, level, POOLED,
            LEVELS, HAS_MIXED,
        )  # fmt: skip
        cost = _work_of(work, batch, work_b, column, n, level, LEVELS)
        low = tl.full([COLUMNS], -_INFINITE, tl.float32)
        for finer in tl.static_range(level):
            turn = _turn(
                error, cost, codes, tops, spread, mixed, work, line, slot, row, batch, work_b,
                column, n, per_octave, finer, False, POOLED, LEVELS, HAS_MIXED,
            )  # fmt: skip
            low = tl.maximum(low, turn)
        high = tl.full([COLUMNS], _INFINITE, tl.float32)
        for coarser in tl.static_range(level + 1, LEVELS + 1):
            turn = _turn(
                error, cost, codes, tops, spread, mixed, work, line, slot, row, batch, work_b,
                column, n, per_octave, coarser, True, POOLED, LEVELS, HAS_MIXED,
            )  # fmt: skip
            high = tl.minimum(high, turn)
        # Best at some price: it replaces the coarsest finer level that is ever best.
        best = low < high
        unit = _work_of(units, batch, work_b, column, n, level, LEVELS)
        gain = tl.where(best & free, before - unit, 0) * size
        before = tl.where(best, unit, before)
        place = tl.ceil((tl.log2(tl.maximum(low, 0.0)) - first_octave) * per_price_octave)
        place = tl.minimum(tl.maximum(place, 0.0), (bins - 1).to(tl.float32)).to(tl.int64)
        at_once += tl.where(place == 0, gain, 0)
        counted = (gain != 0) & (place != 0)
        tl.atomic_add(saved + batch * bins + place, gain, mask=counted, sem="relaxed")
    # What costs nothing to leave out is often much, and would wait at one place.
    whole = tl.sum(at_once, 0)
    tl.atomic_add(saved + batch * bins, whole, mask=whole != 0, sem="relaxed")


def saved_by_price(
    codes: Tensor,
    tops: Tensor,
    spread: Tensor,
    mixed: Tensor | None,
    fixed: Tensor,
    work: Tensor,
    units: Tensor,
    row_sizes: Tensor,
    levels: tuple[int, ...],
    bins: int,
    per_octave: int,
    first_octave: int,
    per_price_octave: int,
) -> Tensor:
    """Work that is saved in every bin of prices, see `planning.tradeoff`. int64 [B, bins].

    codes uint8 [B,H,M,N,L], tops fp32 [B,H], spread fp32 [M,N], mixed bool [N] or None, fixed bool
    [M,N], work fp32 and units int64 [B|1,N,1+L], row_sizes int64 [M]; all contiguous.
    """
    batch = codes.shape[0]
    launch = _saved_launch(
        codes.shape, work.shape[0], levels, mixed is not None, bins, per_octave, first_octave,
        per_price_octave,
    )  # fmt: skip
    saved = torch.zeros(batch, bins, dtype=torch.int64, device=codes.device)
    launch(codes, tops, spread, mixed, fixed, work, units, row_sizes, saved)
    return saved


def _pooled_bits(levels: tuple[int, ...]) -> int:
    return sum(1 << (1 + i) for i, level in enumerate(levels) if level != 0)


@functools.lru_cache(maxsize=256)
def _saved_launch(
    shape: tuple[int, ...], works: int, levels: tuple[int, ...], has_mixed: bool, bins: int,
    per_octave: int, first_octave: int, per_price_octave: int,
) -> Launch:  # fmt: skip
    batch, heads, m, n, count = shape
    if count != len(levels) or count >= _MOST:
        raise ValueError(f"{count} levels of {levels}")
    columns = min(_COLUMNS, max(16, power_of_two(n)))
    constants = {
        "POOLED": _pooled_bits(levels),
        "LEVELS": count,
        "HAS_MIXED": has_mixed,
        "COLUMNS": columns,
        "num_warps": 4,
    }
    numbers = (
        heads, m, n, 0 if works == 1 else n * (1 + count), bins, float(per_octave),
        float(first_octave), float(per_price_octave),
    )  # fmt: skip
    return Launch(_saved_kernel, (cdiv(n, columns), m, batch * heads), numbers, constants)


@triton.jit
def _cheapest_kernel(
    codes, tops, spread, mixed, fixed, work,
    prices,  # fp32 [B]
    counts,  # int32 [LIST_COUNT, lines]
    indices,  # int32 [LIST_COUNT, lines, n]
    heads, m, n, work_b, per_octave,
    RATIOS: tl.constexpr,  # one byte per level, reading in full lowest
    LIST_RATIOS: tl.constexpr, LIST_COUNT: tl.constexpr, POOLED: tl.constexpr,
    LEVELS: tl.constexpr, HAS_MIXED: tl.constexpr, HAS_OWN: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.program_id(1)
    batch = slot // heads
    column = tl.arange(0, N_PAD)
    line = slot.to(tl.int64) * m + row
    price = tl.load(prices + batch)
    free = tl.load(fixed + row * n + column, mask=column < n, other=1) == 0
    chosen = tl.full([N_PAD], RATIOS & 0xFF, tl.int32)
    least = price * _work_of(work, batch, work_b, column, n, 0, LEVELS)
    for level in tl.static_range(1, LEVELS + 1):
        error = _error_of(
            codes, tops, spread, mixed, line, slot, row, column, n, per_octave, level, POOLED,
            LEVELS, HAS_MIXED,
        )  # fmt: skip
        total = error + price * _work_of(work, batch, work_b, column, n, level, LEVELS)
        better = free & (total < least)
        chosen = tl.where(better, (RATIOS >> (8 * level)) & 0xFF, chosen)
        least = tl.where(better, total, least)
    chosen = tl.where(column < n, chosen, 0)
    if not HAS_OWN:  # a row must read something: what it would err most without
        last = _error_of(
            codes, tops, spread, mixed, line, slot, row, column, n, per_octave, LEVELS, POOLED,
            LEVELS, HAS_MIXED,
        )  # fmt: skip
        worst = tl.argmax(tl.where(column < n, last, -1.0), 0)
        chosen = tl.where((tl.max(chosen, 0) == 0) & (column == worst), 1, chosen)
    lines = tl.num_programs(1).to(tl.int64) * m
    store_lists(chosen, counts, indices, line, lines, n, LIST_RATIOS, LIST_COUNT, N_PAD)


def list_cheapest(
    codes: Tensor,
    tops: Tensor,
    spread: Tensor,
    mixed: Tensor | None,
    fixed: Tensor,
    work: Tensor,
    prices: Tensor,
    levels: tuple[int, ...],
    per_octave: int,
    has_own: bool,
) -> StackedLists:
    """Lists of every level but skip of the blocks for which it is best at their sample's price.

    As `saved_by_price`; prices fp32 [B]. Blocks that are `fixed` are read in full. Without own
    blocks a row that would read nothing reads the block that it would err most without.
    """
    spec, launch = _cheapest_launch(
        codes.shape, work.shape[0], levels, mixed is not None, per_octave, has_own
    )
    device = codes.device
    counts = torch.empty(*spec.shape[:4], dtype=torch.int32, device=device)
    indices = torch.empty(*spec.shape, dtype=torch.int32, device=device)
    launch(codes, tops, spread, mixed, fixed, work, prices, counts, indices)
    return StackedLists(spec, counts, indices)


@functools.lru_cache(maxsize=256)
def _cheapest_launch(
    shape: tuple[int, ...], works: int, levels: tuple[int, ...], has_mixed: bool, per_octave: int,
    has_own: bool,
) -> tuple[StackedListsSpec, Launch]:  # fmt: skip
    batch, heads, m, n, count = shape
    if count != len(levels) or count >= _MOST or n > 4096:
        raise ValueError(f"{count} levels of {levels}, {n} blocks")
    listed = (1, *(level for level in levels if level != 0))
    n_pad = power_of_two(n)
    constants = {
        "RATIOS": packed_ratios((1, *levels)),
        "LIST_RATIOS": packed_ratios(listed),
        "LIST_COUNT": len(listed),
        "POOLED": _pooled_bits(levels),
        "LEVELS": count,
        "HAS_MIXED": has_mixed,
        "HAS_OWN": has_own,
        "N_PAD": n_pad,
        **row_options(n_pad, 8),
    }
    numbers = (heads, m, n, 0 if works == 1 else n * (1 + count), float(per_octave))
    launch = Launch(_cheapest_kernel, (m, batch * heads), numbers, constants)
    return StackedListsSpec(listed, (len(listed), batch, heads, m, n)), launch
