"""Packs the pooled blocks of all levels into key tiles, one list of pages per query block.

A page is the longest run of rows that every pooled block is a whole number of. A key tile of
the attention kernel gathers as many pages as it holds, so pooled blocks of 4 to 64 rows all
fill whole tensor-core tiles. Whole tiles of one level come first: their rows all stand for the
same number of keys. What is left of each level, and the block that straddles the end of the keys,
go into a few mixed tiles behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.lists import Lists, StackedLists

from .launch import Launch
from .list_view import NO_LIST, ListView
from .pooling import RATIOS, SECTION_ROWS, Sections
from .score_tiles import cdiv


def page_size(k_block: int, ratios: Mapping[int, object]) -> int:
    """Rows per page: the largest power of two that divides every pooled block of the plan."""
    run = k_block // max(ratios)
    return min(run & -run, SECTION_ROWS)


@triton.jit
def count_below(index, count, limit, BLOCK: tl.constexpr):
    """How many of the first `count` entries of an ascending list are below `limit`."""
    found = 0
    for first in tl.range(0, count, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        block = tl.load(index + entry, mask=entry < count, other=0x7FFFFFFF)
        found += tl.sum((block < limit).to(tl.int32))
    return found


@triton.jit
def _measure(COUNT, INDEX, whole, partial, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Pages in blocks whose keys are all real, and in those with any real key."""
    count = tl.load(COUNT)
    full = count_below(INDEX, count, whole, BLOCK)
    straddling = tl.load(INDEX + full, mask=full < count, other=-1) == whole
    real = full + (straddling & partial).to(tl.int32)
    return full * PER_BLOCK, real * PER_BLOCK


@triton.jit
def _append(IDS, INDEX, total, at, split, mixed_at, start, limit, empty,
            PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write one level's pages, the first `split` of them from `at` on, the rest at `mixed_at`.

    A block may stick out of its section of `limit` pages, where nothing is real: the empty
    page stands in. Returns the next free place among the mixed ones.
    """
    for first in tl.range(0, total, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        ok = entry < total
        block = tl.load(INDEX + entry // PER_BLOCK, mask=ok, other=0)
        page = block * PER_BLOCK + entry % PER_BLOCK
        page = tl.where(page < limit, start + page, empty)
        place = tl.where(entry < split, at + entry, mixed_at + entry - split)
        tl.store(IDS + place, page, mask=ok)
    return mixed_at + total - split


@triton.jit
def _pack_kernel(
    TABLE, LENGTH,
    COUNT2, INDEX2, COUNT4, INDEX4, COUNT8, INDEX8,
    c2, c2b, c2h, c2m, i2, i2b, i2h, i2m, c4, c4b, c4h, c4m, i4, i4b, i4h, i4m,
    c8, c8b, c8h, c8m, i8, i8b, i8h, i8m,
    start2, start4, start8, limit2, limit4, limit8, empty, width, seq,
    K_BLOCK: tl.constexpr, PER2: tl.constexpr, PER4: tl.constexpr, PER8: tl.constexpr,
    PER_TILE: tl.constexpr, HAS_LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes the pages of one query block."""
    m = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = (b * tl.num_programs(1) + h) * tl.num_programs(0) + m
    m64 = m.to(tl.int64)
    ends = TABLE + row * (4 + width)
    ids = ends + 4
    length = seq
    if HAS_LENGTH:
        length = tl.minimum(tl.load(LENGTH + b), seq)
    whole = length // K_BLOCK
    partial = length % K_BLOCK != 0

    index2 = INDEX2 + i2 + b * i2b + h * i2h + m64 * i2m
    index4 = INDEX4 + i4 + b * i4b + h * i4h + m64 * i4m
    index8 = INDEX8 + i8 + b * i8b + h * i8h + m64 * i8m
    end2 = 0
    if PER2 > 0:
        count = COUNT2 + c2 + b * c2b + h * c2h + m64 * c2m
        full2, real2 = _measure(count, index2, whole, partial, PER2, BLOCK)
        end2 = full2 // PER_TILE
    end4 = end2
    if PER4 > 0:
        count = COUNT4 + c4 + b * c4b + h * c4h + m64 * c4m
        full4, real4 = _measure(count, index4, whole, partial, PER4, BLOCK)
        end4 = end2 + full4 // PER_TILE
    end8 = end4
    if PER8 > 0:
        count = COUNT8 + c8 + b * c8b + h * c8h + m64 * c8m
        full8, real8 = _measure(count, index8, whole, partial, PER8, BLOCK)
        end8 = end4 + full8 // PER_TILE

    at = end8 * PER_TILE
    if PER2 > 0:
        at = _append(ids, index2, real2, 0, end2 * PER_TILE, at, start2, limit2, empty,
                     PER2, BLOCK)  # fmt: skip
    if PER4 > 0:
        at = _append(ids, index4, real4, end2 * PER_TILE, (end4 - end2) * PER_TILE, at, start4,
                     limit4, empty, PER4, BLOCK)  # fmt: skip
    if PER8 > 0:
        at = _append(ids, index8, real8, end4 * PER_TILE, (end8 - end4) * PER_TILE, at, start8,
                     limit8, empty, PER8, BLOCK)  # fmt: skip
    end = tl.cdiv(at, PER_TILE)
    rest = at + tl.arange(0, PER_TILE)
    nothing = tl.zeros((PER_TILE,), dtype=tl.int32) + empty
    tl.store(ids + rest, nothing, mask=rest < end * PER_TILE)
    tl.store(ends, end2)
    tl.store(ends + 1, end4)
    tl.store(ends + 2, end8)
    tl.store(ends + 3, end)


class PageTableLaunch(NamedTuple):
    """The launch that writes a page table, the table's shape, and how many rows a page has."""

    ratios: tuple[int, ...]
    table: tuple[int, int, int, int]
    size: int
    launch: Launch

    def __call__(self, lists: Lists, key_length: Tensor | None) -> Tensor:
        """The page table of these lists: int32 [B', H', M, 4 + W]; B' and H' are 1 where all lists
        have 1 there.

        First four tile numbers per query block: the tile behind the last one of ratio 2, 4 and 8,
        and of the mixed tiles, which the empty page fills up. Then its pages, tile after tile: page
        p is rows p*size .. p*size + size - 1 of the pooled keys. Blocks without a real key are left
        out. W is the most the lists can hold, so nothing is read back from the device.
        """
        if type(lists) is StackedLists:
            at2 = at4 = at8 = lists.counts, lists.indices
        else:
            anywhere = lists[self.ratios[0]]  # stands in for a list that is not there
            at2, at4, at8 = (lists.get(ratio, anywhere) for ratio in RATIOS)
        table = torch.empty(*self.table, dtype=torch.int32, device=at2[0].device)
        self.launch(table, key_length, *at2, *at4, *at8)
        return table


def page_table_launch(
    lists: tuple[tuple[int, ListView], ...], sections: Sections, k_block: int, tile: int, seq: int,
    lengths: int | None,
) -> PageTableLaunch:  # fmt: skip
    """What packs the pooled lists, in the order of the sections, for key tiles of `tile` rows.

    `seq`: how many keys there are; `lengths`: how many samples have a key length of their own.
    """
    pooled, start_of = dict(lists), dict(sections.starts)
    size = min(page_size(k_block, pooled), tile)
    per_tile = tile // size
    shapes = [view.shape for view in pooled.values()]
    batch, heads = max(b for b, _, _, _ in shapes), max(h for _, h, _, _ in shapes)
    rows = shapes[0][2]
    per_block = {ratio: k_block // (ratio * size) for ratio in pooled}
    width = sum(view.shape[3] * per_block[ratio] for ratio, view in pooled.items())
    width = max(cdiv(width, per_tile) * per_tile, per_tile)
    if lengths is not None:
        batch = max(batch, lengths)
    numbers: list[int] = []
    for ratio in RATIOS:
        numbers += pooled[ratio].numbers if ratio in pooled else NO_LIST
    numbers += [start_of[ratio] // size if ratio in pooled else 0 for ratio in RATIOS]
    numbers += [sections.tokens // ratio // size if ratio in pooled else 0 for ratio in RATIOS]
    numbers += [sections.empty_row // size, width, seq]
    constants = {
        "K_BLOCK": k_block,
        "PER2": per_block.get(2, 0),
        "PER4": per_block.get(4, 0),
        "PER8": per_block.get(8, 0),
        "PER_TILE": per_tile,
        "HAS_LENGTH": lengths is not None,
        "BLOCK": 256,
        "num_warps": 2,
    }
    launch = Launch(_pack_kernel, (rows, heads, batch), tuple(numbers), constants)
    return PageTableLaunch(tuple(pooled), (batch, heads, rows, 4 + width), size, launch)
