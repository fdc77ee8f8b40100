"""One threshold for all rows and heads of a sample, so that together they cost a share.

Rows and heads then differ in how much they read: that is the point of a threshold. It is found
exactly, on the device: the work of all blocks is added up by score, first by the upper half of a
score's bits, then, among those that the first half leaves open, by the lower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.kernels.lists import MEAN
from jali.planning.cost import read_sizes
from jali.planning.distortion import numbers_at_once
from jali.planning.plan import BlockPlan
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

Sum = Callable[[Tensor], Tensor]
HALF = 2**16  # values of half the bits of a score


def within_share(
    scores: Tensor,
    layout: BlockLayout,
    share: float,
    always: Tensor,
    padding: KeyPadding | None = None,
    tail: bool = False,
    total_over_ranks: Sum | None = None,
    per_head: bool = False,
) -> Tensor:
    """The blocks with the highest scores, as many as cost no more than `share` of dense attention
    over the rows that are counted. bool [B, H, M, N].

    scores [B, H, M, N]; NaN is the lowest. What is `always` read (bool [M, N]) counts in the share,
    and so does the mean that a `tail` reads of every other block; rows of text read everything and
    do not count. Equal scores are kept or left together. One threshold serves a sample, or with
    `per_head` a head; `total_over_ranks` sums over ranks that hold other heads.
    """
    if share >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    B, H = scores.shape[:2]
    groups = H if per_head else 1  # of heads that share a threshold
    work, known = _work(layout, padding, always, tail)
    known = (known * (H // groups)).expand(B, 2).repeat_interleave(groups, dim=0)
    total = total_over_ranks or (lambda x: x)

    order = _ordered(scores)
    upper, lower = (order >> 16) + HALF // 2, order & (HALF - 1)
    each = work[:, None].expand_as(order)
    sums = total(torch.cat([_work_by_place(upper, each, groups), known], dim=1))
    room = (share * sums[:, -1].double() + 1e-6).long() - sums[:, -2]
    above, room = _cut(sums[:, :HALF], room)
    undecided = upper == above.view(B, groups, 1, 1)
    # The others add nothing, wherever they lie: in one place they would wait for one another.
    sums = total(_work_by_place(lower, torch.where(undecided, each, 0), groups))
    below, _ = _cut(sums, room)
    cut = (above - HALF // 2) * HALF + below
    return order > cut.view(B, groups, 1, 1)


# Layers of a transformer call share all of it.
@functools.lru_cache(maxsize=16)
def _work(
    layout: BlockLayout, padding: KeyPadding | None, always: Tensor, tail: bool
) -> tuple[Tensor, Tensor]:
    """What reading a block adds to the work of a head, 0 for what is read always, int64
    [B|1, M, N]; and what a head reads always and in dense attention, int64 [B|1, 2]."""
    rows = layout.row_sizes
    if layout.counted_rows is not None:
        rows = rows * layout.counted_rows
    real = read_sizes(layout, (1,), padding)[0].long()
    mean = read_sizes(layout, (MEAN,), padding)[0].long() if tail else torch.zeros_like(real)
    extra = rows[:, None] * (real - mean)[:, None]
    fixed = torch.where(always, extra, 0).sum((1, 2)) + rows.sum() * mean.sum(-1)
    known = torch.stack([fixed, rows.sum() * real.sum(-1)], dim=-1)
    return torch.where(always, 0, extra), known


def _ordered(scores: Tensor) -> Tensor:
    """Whole numbers in the order of the scores, int32: the bits of a float, with those of negative
    ones turned round."""
    bits = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = bits.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _work_by_place(place: Tensor, work: Tensor, groups: int) -> Tensor:
    """Work int64 [B, H, M, N], added up by its place below HALF, int32, in one group of all heads
    or a group for each. int64 [B · groups, HALF]."""
    B, H, M, N = place.shape
    sums = work.new_zeros(B, H if place.is_cuda else groups, HALF)  # a GPU adds up faster apart
    each = max(1, numbers_at_once(place.device) // (B * M * N))
    for start in range(0, H, each):
        some, own = (x[:, start : start + each] for x in (place, work))
        if sums.shape[1] == 1:
            sums[:, 0].scatter_add_(1, some.flatten(1).long(), own.flatten(1))
        else:
            into = sums[:, start : start + each]
            into.scatter_add_(2, some.flatten(2).long(), own.flatten(2))
    if sums.shape[1] != groups:
        sums = sums.sum(1, keepdim=True)
    return sums.flatten(0, 1)


def _cut(sums: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """The highest bin that does not fit into the room with all bins above it (−1: all fit), and the
    room that those leave."""
    bins = sums.shape[1]
    # One row of sums after the other: a GPU adds up along one long row at once, not along many.
    reached = sums.flip(1).flatten().cumsum(0).view_as(sums)
    reached = reached - F.pad(reached[:-1, -1:], (0, 0, 1, 0))
    fit = (reached <= room[:, None]).sum(1)
    taken = reached.gather(1, (fit - 1).clamp_min(0)[:, None])[:, 0]
    return bins - 1 - fit, room - torch.where(fit > 0, taken, 0)


def plan_of(kept: Tensor, scores: Tensor, always: Tensor, layout: BlockLayout) -> BlockPlan:
    """A plan of the blocks that are `kept` or `always` read; rows of text read everything, and a
    row that would read nothing its best block."""
    kept = kept | always | layout.text_rows[:, None]
    if not layout.has_own:  # no own blocks
        best = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).argmax(-1, keepdim=True)
        first = torch.zeros_like(kept).scatter_(-1, best, True)
        kept = kept | (first & ~kept.any(-1, keepdim=True))
    return BlockPlan(layout, (1,), map=kept.to(torch.uint8))
