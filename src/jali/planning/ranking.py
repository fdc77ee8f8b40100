"""Block pairs of a layout, ranked once by where they lie: plans that look at no tensor."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali.planning.budget import blocks_for
from jali.planning.plan import BlockPlan
from jali.tokens.layout import BlockLayout


@dataclass(frozen=True, eq=False)
class RankedPairs:
    """In which order block pairs are read, for any budget.

    `ranks` int32 [M, N] on the device, from 0; −1 in rows of text, which read everything. The
    first `least` are always read, the first `published` by the published pattern, and `pairs`
    are those that a budget counts.
    """

    layout: BlockLayout
    ranks: Tensor
    least: int
    published: int
    pairs: int

    def plan(self, share: float | None) -> BlockPlan:
        """The first pairs that make up a share of all; None is the published pattern."""
        if share is None:
            return _plan(self, self.published)
        return _plan(self, max(self.least, blocks_for(share, self.pairs)))


# The layers of a step mostly have one budget: they share a plan, and the lists made of it.
@functools.lru_cache(maxsize=32)
def _plan(ranked: RankedPairs, count: int) -> BlockPlan:
    levels = (ranked.ranks < count).to(torch.uint8)
    return BlockPlan(ranked.layout, (1,), map=levels[None, None])


def rank_pairs(
    layout: BlockLayout, pattern: NDArray[np.bool_], priority: NDArray[np.float64]
) -> RankedPairs:
    """What is forced comes first, then the pattern, then the rest, each by rising priority.

    Both arrays [M, N] on the host. Equal priorities are spread evenly over rows. A row where
    nothing is forced always reads its first pair.
    """
    forced = layout.forced.cpu().numpy().copy()
    own_rank = priority.argsort(axis=1, kind="stable").argsort(axis=1)
    forced |= (own_rank == 0) & ~forced.any(1, keepdims=True)
    rows = ~layout.text_rows.cpu().numpy()
    pattern = pattern | forced
    keys = (own_rank, priority, ~pattern, ~forced)
    order = np.lexsort(tuple(key[rows].ravel() for key in keys))
    ranked = np.empty(len(order), dtype=np.int32)
    ranked[order] = np.arange(len(order), dtype=np.int32)
    ranks = np.full(forced.shape, -1, dtype=np.int32)
    ranks[rows] = ranked.reshape(-1, layout.N)
    return RankedPairs(
        layout,
        torch.from_numpy(ranks).to(layout.device),
        least=int(forced[rows].sum()),
        published=int(pattern[rows].sum()),
        pairs=len(order),
    )
