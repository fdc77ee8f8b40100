"""How many pairs of a query and a key a plan's lists stand for."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.lists import Lists, StackedLists

from .launch import Launch
from .score_tiles import power_of_two
from .select_lists import row_options


@triton.jit
def _pairs_read_kernel(
    counts,  # int32 [R, B|1, H, M]
    indices,  # int32 [R, B|1, H, M, W]
    sizes,  # int32 [R, B|1, N]
    rows,  # int64 [M]
    pairs,  # int64 [R, B, H, M]
    heads, width, n, lists_batch, sizes_batch, batch,
    W_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.program_id(1)
    ratio = tl.program_id(2)
    m = tl.num_programs(0)
    sample = slot // heads
    head = slot % heads
    line = (ratio * lists_batch + sample % lists_batch).to(tl.int64) * heads + head
    line = line * m + row
    size = sizes + (ratio * sizes_batch + sample % sizes_batch).to(tl.int64) * n
    entry = tl.arange(0, W_PAD)
    listed = entry < tl.load(counts + line)
    block = tl.load(indices + line * width + entry, mask=listed, other=0)
    keys = tl.sum(tl.load(size + block, mask=listed, other=0), 0)
    at = ((ratio * batch + sample).to(tl.int64) * heads + head) * m + row
    tl.store(pairs + at, keys.to(tl.int64) * tl.load(rows + row))


def pairs_read(lists: Lists, ratios: tuple[int, ...], sizes: Tensor, rows: Tensor) -> Tensor:
    """Pairs that every head computes: int64 [B, H].

    `lists` of every ratio (one batch and number of heads, or 1, each); `sizes` int32 [R, B|1, N]:
    what there is to read in a key block at each ratio; `rows` int64 [M]: queries of a query block.
    """
    counts, indices = _stacked(lists, ratios)
    R, lists_batch, heads, M, width = indices.shape
    batch = max(lists_batch, sizes.shape[1])
    pairs = torch.empty(R, batch, heads, M, dtype=torch.int64, device=rows.device)
    launch = _launch(R, batch, heads, M, width, sizes.shape[2], lists_batch, sizes.shape[1])
    launch(counts, indices, sizes, rows, pairs)
    return pairs.sum((0, -1))


def _stacked(lists: Lists, ratios: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Counts [R, B|1, H|1, M] and indices [R, B|1, H|1, M, W], contiguous."""
    if type(lists) is StackedLists and lists.spec.ratios == ratios:
        return lists.counts, lists.indices
    parts = [lists[ratio] for ratio in ratios]
    if len(parts) == 1:
        return parts[0].counts[None].contiguous(), parts[0].indices[None].contiguous()
    counts = torch.broadcast_tensors(*(part.counts for part in parts))
    width = max(part.indices.shape[-1] for part in parts)
    indices = [
        torch.nn.functional.pad(part.indices, (0, width - part.indices.shape[-1])).expand(
            *counts[0].shape, width
        )
        for part in parts
    ]
    return torch.stack(counts), torch.stack(indices)


@functools.lru_cache(maxsize=256)
def _launch(
    ratios: int, batch: int, heads: int, m: int, width: int, n: int, lists_batch: int,
    sizes_batch: int,
) -> Launch:  # fmt: skip
    w_pad = power_of_two(width)
    constants = {"W_PAD": w_pad, **row_options(w_pad, None)}
    numbers = (heads, width, n, lists_batch, sizes_batch, batch)
    return Launch(_pairs_read_kernel, (m, batch * heads, ratios), numbers, constants)
