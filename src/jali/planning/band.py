"""Bands around the diagonal of two orders of a video: frame by frame, and place by place."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali.planning.ranking import RankedPairs, rank_pairs
from jali.tokens.grid import Box
from jali.tokens.layout import BlockLayout
from jali.tokens.order import PerHead
from jali.tokens.place import inverse, middles, place_by_place

Slots = NDArray[np.intp]


class BandedOrders:
    """What a layout of `PerHead` has in each of the two orders, 0 frame by frame, 1 place by place.

    `q` int64 [2, Sq] and `k` [2, Sk] are the orders, `q_slots` and `k_slots` where each token went.
    `bands` rank block pairs by their distance in an order.
    """

    def __init__(self, layout: BlockLayout, share: float, first_frame: bool) -> None:
        orders = [
            np.stack([np.arange(grid.tokens), place_by_place(grid)])
            for grid in (layout.q_grid, layout.k_grid)
        ]
        slots = [np.stack([inverse(order) for order in both]) for both in orders]
        self.q, self.k, self.q_slots, self.k_slots = (
            torch.from_numpy(x).to(layout.device) for x in (*orders, *slots)
        )
        places = [_among_keys(layout, q, k) for q, k in zip(orders[0], slots[1], strict=True)]
        self.bands = tuple(_band(layout, place, share, first_frame) for place in places)

    def levels(self, share: float | None) -> Tensor:
        """What each order reads at a budget. uint8 [2, M, N]."""
        return torch.cat([band.plan(share).levels[0] for band in self.bands])

    def seen(self, rows: Tensor, share: float | None, layout: BlockLayout) -> Tensor:
        """Which keys these queries would see in each order, by token. bool [2, R, Sk]."""
        blocks = self.q_slots[:, rows] // layout.blocks.q, self.k_slots // layout.blocks.k
        found = [levels[q][:, k] for levels, q, k in zip(self.levels(share), *blocks, strict=True)]
        return torch.stack(found).bool()


@functools.lru_cache(maxsize=16)
def banded_orders(layout: BlockLayout, share: float, first_frame: bool) -> BandedOrders:
    return BandedOrders(layout, share, first_frame)


def _among_keys(layout: BlockLayout, q_order: Slots, k_slots: Slots) -> NDArray[np.float64]:
    """Where the query of every slot lies among the keys' slots. [Sq]."""
    if layout.offset is None:  # another sequence, as long as this one
        return np.arange(len(q_order)) * len(k_slots) / len(q_order)
    token = PerHead().positions(layout.q_grid)[q_order] + layout.offset
    return k_slots[inverse(PerHead().positions(layout.k_grid))[token]].astype(float)


def _band(
    layout: BlockLayout, place: NDArray[np.float64], share: float, first_frame: bool
) -> RankedPairs:
    """The band that holds a share of all pairs, and as much as a frame at the beginning."""
    grid = layout.k_grid
    text = grid.tokens - grid.placed
    share = min(1.0, max(0.0, share - 2 * text / grid.tokens))  # text is read anyway
    width = grid.tokens * (1 - math.sqrt(1 - share))
    keys = middles(np.arange(float(grid.tokens))[:, None], layout.blocks.k)[:, 0]
    apart = np.abs(middles(place[:, None], layout.blocks.q) - keys)
    box = next((s for s in grid.segments if isinstance(s, Box)), None)
    frame = box.height * box.width if box and box.frames > 1 and first_frame else -1
    first = np.broadcast_to(keys <= frame, apart.shape)
    near = apart <= max(layout.blocks.q, layout.blocks.k)
    priority = np.where(near, -2.0, np.where(first, -1.0, apart))
    return rank_pairs(layout, (apart < width) | first, priority)
