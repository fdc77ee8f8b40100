"""From scores to pyramid levels: each block gets the first ratio whose share of the ranks it is in.

Only the few boundaries between levels matter: each is found by exact selection, no row is sorted.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.lists import StackedLists, StackedListsSpec

from .launch import Launch
from .score_tiles import power_of_two
from .select_lists import packed_ratios, row_options, store_lists
from .select_rank import HIGHEST, cut_of, midpoint, ordered_keys, running_counts


@triton.jit
def _list_levels_kernel(
    scores, ends, forced, full_rows, cap,
    counts,  # int32 [LIST_COUNT, lines]
    indices,  # int32 [LIST_COUNT, lines, n]
    m, n, end_stride,
    RATIOS: tl.constexpr,  # one byte per level, first level lowest
    COUNT: tl.constexpr,
    LIST_RATIOS: tl.constexpr,  # the same of the levels that are listed
    LIST_COUNT: tl.constexpr, N_PAD: tl.constexpr, HAS_FORCED: tl.constexpr, HAS_FULL: tl.constexpr,
    HAS_CAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.program_id(1)
    line = slot.to(tl.int64) * m + row
    column = tl.arange(0, N_PAD)
    real = column < n
    key = ordered_keys(tl.load(scores + line * n + column, mask=real, other=float("nan")))
    if HAS_FORCED:
        must = tl.load(forced + row * n + column, mask=real, other=0) != 0
        key = tl.where(must, HIGHEST, key)
    fixed = tl.sum((key == HIGHEST).to(tl.int32), 0)
    level = tl.zeros([N_PAD], tl.int32)
    for index in tl.static_range(COUNT):
        end = tl.minimum(tl.load(ends + line * end_stride + index), n)
        k = tl.maximum(end, 1)
        # Forced entries cannot be told apart by rank; an end among them is left to the scan.
        cut, exact = cut_of(key, real, tl.maximum(k, fixed))
        exact &= k >= fixed
        cut = tl.where(k < fixed, HIGHEST, cut)
        if exact:  # nobody ties at the cut, so nothing needs to be counted
            within = key > cut
        else:
            above, equal = running_counts(key, cut)
            ties = k - tl.max(above, 0)
            within = (key > cut) | ((key == cut) & (equal <= ties))
        within &= real & (end > 0)
        level = tl.where(within & (level == 0), (RATIOS >> (8 * index)) & 0xFF, level)
    if HAS_FORCED:
        level = tl.where(must, 1, level)
    if HAS_FULL:
        level = tl.where(tl.load(full_rows + row) != 0, 1, level)
    if HAS_CAP:
        most = tl.load(cap + slot.to(tl.int64) * n + column, mask=real, other=1).to(tl.int32)
        level = tl.minimum(level, most)
    level = tl.where(real, level, 0)
    # A row that would read nothing reads its first block.
    level = tl.where((tl.max(level, 0) == 0) & (column == 0), 1, level)
    lines = tl.num_programs(1).to(tl.int64) * m
    store_lists(level, counts, indices, line, lines, n, LIST_RATIOS, LIST_COUNT, N_PAD)


def list_levels(
    scores: Tensor,
    ends: Tensor,
    ratios: tuple[int, ...],
    list_ratios: tuple[int, ...],
    forced: Tensor | None = None,
    full_rows: Tensor | None = None,
    cap: Tensor | None = None,
    *,
    warps: int | None = None,
) -> StackedLists:
    """Blocks by level: the lists of those read at each of `list_ratios`. Widths are N; a count may
    be 0.

    Blocks rank by (forced, score descending, lower index); the block of rank p gets the first of
    `ratios` whose end is above p, and none behind the last end. `ends` int32 [R] or [B,H,M,R].
    `forced` bool/uint8 [M,N] blocks and all blocks of `full_rows` [M] get level 1. `cap` uint8
    [B,H,N], at least 1, bounds levels from above (a skipped block stays skipped). A row that would
    read nothing reads its first block in full. N <= 4096, at most 7 ratios; all tensors but `cap`
    contiguous. `warps` tunes speed only.
    """
    spec, launch = _levels_launch(
        scores.shape, ends.shape, ratios, list_ratios, forced is not None, full_rows is not None,
        cap is not None, warps,
    )  # fmt: skip
    shape, device = spec.shape, scores.device
    counts = torch.empty(*shape[:4], dtype=torch.int32, device=device)
    indices = torch.empty(*shape, dtype=torch.int32, device=device)
    rows_cap = None if cap is None else cap.contiguous()
    launch(scores, ends, forced, full_rows, rows_cap, counts, indices)
    return StackedLists(spec, counts, indices)


@functools.lru_cache(maxsize=256)
def _levels_launch(
    shape: tuple[int, ...], ends: tuple[int, ...], ratios: tuple[int, ...],
    listed: tuple[int, ...], has_forced: bool, has_full: bool, has_cap: bool, warps: int | None,
) -> tuple[StackedListsSpec, Launch]:  # fmt: skip
    """What the lists are but for their numbers, and what writes them."""
    batch, heads, m, n = shape
    if n > 4096 or not 1 <= len(ratios) <= 7 or ends[-1] != len(ratios):
        raise ValueError(f"{n} blocks, {len(ratios)} ratios, ends {tuple(ends)}")
    n_pad = power_of_two(n)
    constants = {
        "RATIOS": packed_ratios(ratios),
        "COUNT": len(ratios),
        "LIST_RATIOS": packed_ratios(listed),
        "LIST_COUNT": len(listed),
        "N_PAD": n_pad,
        "HAS_FORCED": has_forced,
        "HAS_FULL": has_full,
        "HAS_CAP": has_cap,
        **row_options(n_pad, warps),
    }
    numbers = (m, n, 0 if len(ends) == 1 else len(ratios))
    launch = Launch(_list_levels_kernel, (m, batch * heads), numbers, constants)
    return StackedListsSpec(listed, (len(listed), *shape)), launch


@triton.jit
def _cumulative_ends_kernel(
    scores, bounds, forced, ends, m, n, least,
    COUNT: tl.constexpr, N_PAD: tl.constexpr, HAS_FORCED: tl.constexpr, CROSSING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.program_id(1)
    column = tl.arange(0, N_PAD)
    real = column < n
    line = slot.to(tl.int64) * m + row
    score = tl.load(scores + line * n + column, mask=real, other=0.0)
    score = tl.where(score > 0.0, score, 0.0)
    key = ordered_keys(score)
    total = tl.sum(score, 0)
    fixed = 0
    spent = 0.0
    if HAS_FORCED:
        must = tl.load(forced + row * n + column, mask=real, other=0) != 0
        fixed = tl.sum(must.to(tl.int32), 0)
        spent = tl.sum(tl.where(must, score, 0.0), 0)
        real &= ~must
    for index in tl.static_range(COUNT):
        bound = (tl.load(bounds + index) + 1e-6) * total
        # The lowest cut whose entries at or above it still fit; keys of scores are never negative.
        over = 0
        # All at or above `fit` fit; all at or above `over` do not (or `over` is 0). It ends when
        # one entry lies between the two: that one is the first that does not fit.
        fit = tl.max(key, 0) + 1
        between = n
        step = 0
        while (over + 1 < fit) & (between > 1):
            lower = tl.minimum(midpoint(over, fit, step), fit - 1)
            inside = real & (key >= lower)
            fits = spent + tl.sum(tl.where(inside, score, 0.0), 0) <= bound
            fit = tl.where(fits, lower, fit)
            over = tl.where(fits, over, lower)
            between = tl.sum((real & (key >= over) & (key < fit)).to(tl.int32), 0)
            step += 1
        over = tl.maximum(over, tl.max(tl.where(real & (key < fit), key, 0), 0))
        # `over` is the highest key at which the sum no longer fits (0 if everything fits).
        inside = real & (key > over)
        used = spent + tl.sum(tl.where(inside, score, 0.0), 0)
        count = tl.sum(inside.to(tl.int32), 0)
        at_cut = real & (key == over)
        ties = tl.sum(at_cut.to(tl.int32), 0)
        value = tl.max(tl.where(at_cut, score, 0.0), 0)
        fitting = tl.floor((bound - used) / tl.where(value > 0.0, value, 1.0)).to(tl.int32)
        fitting = tl.where(value > 0.0, tl.minimum(tl.maximum(fitting, 0), ties), ties)
        count += fitting + fixed
        if CROSSING:
            count = tl.where((count > 0) & (spent <= bound), count + 1, count)
        if index == 0:
            count = tl.maximum(count, least)
        tl.store(ends + line * COUNT + index, tl.minimum(count, n))


def cumulative_ends(
    scores: Tensor,
    bounds: Tensor,
    least: int = 0,
    *,
    crossing: bool = True,
    forced: Tensor | None = None,
    warps: int | None = None,
) -> Tensor:
    """How many of the best blocks hold each cumulative share of a row: int32 [B,H,M,R].

    scores [B,H,M,N] non-negative; `bounds` fp32 [R] shares of the row's sum. An end is the number
    of blocks, best first, whose running sum stays within the bound (plus 1e-6 of the row); with
    `crossing` the block that crosses it belongs too, unless not even the best block fits. The first
    end is at least `least`; none exceeds N. `forced` bool/uint8 [M,N] blocks rank first.
    """
    shape, count = scores.shape, bounds.shape[0]
    ends = torch.empty(*shape[:3], count, dtype=torch.int32, device=scores.device)
    launch = _ends_launch(shape, count, least, forced is not None, crossing, warps)
    flags = None if forced is None else forced.contiguous()
    launch(scores.contiguous(), bounds.contiguous(), flags, ends)
    return ends


@functools.lru_cache(maxsize=256)
def _ends_launch(
    shape: tuple[int, ...], count: int, least: int, has_forced: bool, crossing: bool,
    warps: int | None,
) -> Launch:  # fmt: skip
    batch, heads, m, n = shape
    n_pad = power_of_two(n)
    constants = {
        "COUNT": count,
        "N_PAD": n_pad,
        "HAS_FORCED": has_forced,
        "CROSSING": crossing,
        **row_options(n_pad, warps),
    }
    return Launch(_cumulative_ends_kernel, (m, batch * heads), (m, n, least), constants)
