"""Packs the pooled blocks of all levels into one list of granules per query block.

A granule is the longest run of rows that every pooled block is a whole number of. A key tile of
the attention kernel gathers as many granules as it holds, from whatever levels come next, so
pooled blocks of 4 to 64 rows all fill whole tensor-core tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.pooling import SECTION_ROWS, Pyramid, on_device

Lists = Mapping[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Granules:
    """`tiles` int32 [B', H', M]: how many key tiles a query block's pooled blocks fill.

    `ids` int32 [B', H', M, W]: its granules; granule g is rows g*size .. g*size + size - 1 of the
    Pyramid. The last tile is filled up with the empty granule. B' and H' are 1 where all lists are.
    """

    tiles: Tensor
    ids: Tensor
    size: int


def granule_size(k_block: int, ratios: Mapping[int, object]) -> int:
    """Rows per granule: the largest power of two that divides every pooled block of the plan."""
    run = k_block // max(ratios)
    return min(run & -run, SECTION_ROWS)


@triton.jit
def _append(
    IDS, COUNT, INDEX, at, start, limit, empty, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the granules of one level's blocks from entry `at` on; returns the next free entry.

    A block that sticks out of its section (`limit` granules) has nothing real there: the empty
    granule stands in for it.
    """
    total = tl.load(COUNT) * PER_BLOCK
    for first in tl.range(0, total, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        ok = entry < total
        block = tl.load(INDEX + entry // PER_BLOCK, mask=ok, other=0)
        granule = block * PER_BLOCK + entry % PER_BLOCK
        granule = tl.where(granule < limit, start + granule, empty)
        tl.store(IDS + at + entry, granule, mask=ok)
    return at + total


@triton.jit
def _pack_kernel(
    TILES, IDS,
    COUNT2, INDEX2, COUNT4, INDEX4, COUNT8, INDEX8,
    c2b, c2h, c2m, i2b, i2h, i2m, c4b, c4h, c4m, i4b, i4h, i4m, c8b, c8h, c8m, i8b, i8h, i8m,
    start2, start4, start8, limit2, limit4, limit8, empty, width,
    PER2: tl.constexpr, PER4: tl.constexpr, PER8: tl.constexpr,
    PER_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes the granules of one query block."""
    m = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = (b * tl.num_programs(1) + h) * tl.num_programs(0) + m
    ids = IDS + row * width
    at = 0
    if PER2 > 0:
        count = COUNT2 + b * c2b + h * c2h + m * c2m
        index = INDEX2 + b * i2b + h * i2h + m.to(tl.int64) * i2m
        at = _append(ids, count, index, at, start2, limit2, empty, PER2, BLOCK)
    if PER4 > 0:
        count = COUNT4 + b * c4b + h * c4h + m * c4m
        index = INDEX4 + b * i4b + h * i4h + m.to(tl.int64) * i4m
        at = _append(ids, count, index, at, start4, limit4, empty, PER4, BLOCK)
    if PER8 > 0:
        count = COUNT8 + b * c8b + h * c8h + m * c8m
        index = INDEX8 + b * i8b + h * i8h + m.to(tl.int64) * i8m
        at = _append(ids, count, index, at, start8, limit8, empty, PER8, BLOCK)
    tiles = tl.cdiv(at, PER_TILE)
    rest = at + tl.arange(0, PER_TILE)
    tl.store(
        ids + rest, tl.zeros((PER_TILE,), dtype=tl.int32) + empty, mask=rest < tiles * PER_TILE
    )
    tl.store(TILES + row, tiles)


def broadcast_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of a list's first three dims, 0 where the batch or head dim is 1."""
    return (
        0 if x.shape[0] == 1 else x.stride(0),
        0 if x.shape[1] == 1 else x.stride(1),
        x.stride(2),
    )


def pack_granules(lists: Lists, pyramid: Pyramid, k_block: int, tile: int) -> Granules:
    """Pack the lists of the pooled ratios in `pyramid` for key tiles of `tile` rows.

    The width of `ids` is the most the lists can hold, so nothing is read back from the device.
    """
    pooled = {ratio: lists[ratio] for ratio in sorted(pyramid.starts)}
    size = min(granule_size(k_block, pooled), tile)
    per_tile = tile // size
    batch = max(counts.shape[0] for counts, _ in pooled.values())
    heads = max(counts.shape[1] for counts, _ in pooled.values())
    first_counts, _ = next(iter(pooled.values()))
    rows = first_counts.shape[2]
    device = first_counts.device
    per_block = {ratio: k_block // (ratio * size) for ratio in pooled}
    width = sum(indices.shape[3] * per_block[ratio] for ratio, (_, indices) in pooled.items())
    width = triton.cdiv(width, per_tile) * per_tile
    tiles = torch.empty(batch, heads, rows, dtype=torch.int32, device=device)
    ids = torch.empty(batch, heads, rows, max(width, per_tile), dtype=torch.int32, device=device)

    tensors: list[Tensor] = []
    strides: list[int] = []
    for ratio in (2, 4, 8):
        counts, indices = pooled.get(ratio, (first_counts, ids))
        tensors += [counts, indices]
        strides += [*broadcast_strides(counts), *broadcast_strides(indices)]
    with on_device(device):
        _pack_kernel[(rows, heads, batch)](
            tiles, ids, *tensors, *strides,
            *(pyramid.starts.get(ratio, 0) // size for ratio in (2, 4, 8)),
            *(pyramid.section_rows(r) // size if r in pooled else 0 for r in (2, 4, 8)),
            pyramid.empty_row // size, ids.shape[3],
            *(per_block.get(ratio, 0) for ratio in (2, 4, 8)),
            PER_TILE=per_tile, BLOCK=256, num_warps=2,
        )  # fmt: skip
    return Granules(tiles, ids, size)
