"""Sliding tile attention: a tile of the video reads the window of tiles around it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jali.methods.method import kept_dense
from jali.methods.placed import Placed, three_sizes
from jali.planning.ranking import RankedPairs, rank_pairs
from jali.tokens.layout import BlockLayout
from jali.tokens.order import Order, Tiled
from jali.tokens.place import places

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Sta(Placed):
    """Read the window of tiles around a query's tile, moved inward where it meets an edge.

    Args:
        window_size: tiles that are read in t, h and w; an even count reads one more, as theirs.
        tile_size: tokens of a tile in t, h and w.
        budget: share of the block pairs: the window grows or shrinks to it, in its proportions.
        block_size: tokens in a block, of queries and of keys.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> attend(q, k, v, method=Sta(window_size=(3, 3, 3)), grid=(30, 48, 80))
    """

    window_size: Triple = (3, 3, 3)
    tile_size: Triple = (6, 8, 8)

    name: ClassVar[str] = "sta"
    own_schedule = kept_dense(0.24)  # 12 of 50 steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window_size", "tile_size"):
            object.__setattr__(self, name, three_sizes(name, getattr(self, name)))

    @property
    def token_order(self) -> Order:
        return Tiled(self.tile_size)

    def ranked(self, layout: BlockLayout) -> RankedPairs:
        return _ranked(layout, self.window_size, self.tile_size)


@functools.lru_cache(maxsize=16)
def _ranked(layout: BlockLayout, window: Triple, tile: Triple) -> RankedPairs:
    """By how much the window has to grow until it holds a pair."""
    queries, keys = (tokens // np.array([1, *tile]) for tokens in places(layout))
    last = np.empty_like(keys)  # tile of a key's box, where windows meet the edge
    for box in np.unique(keys[:, 0]):
        last[keys[:, 0] == box] = keys[keys[:, 0] == box].max(0)
    q_at = np.arange(0, len(queries), layout.blocks.q)
    k_at = np.arange(0, len(keys), layout.blocks.k)
    low, high = (end.reduceat(queries, q_at).T[:, :, None] for end in (np.minimum, np.maximum))
    first, end = (some.reduceat(keys, k_at).T[:, None] for some in (np.minimum, np.maximum))
    edge = np.maximum.reduceat(last, k_at).T[:, None]
    # A window that meets an edge moves inward: from there it reaches twice as far.
    after = np.minimum(first - high, np.ceil(first / 2))
    before = np.minimum(low - end, np.ceil((edge - end) / 2))
    reach = np.where(first > high, after, np.where(end < low, before, 0))[1:]  # [3, M, N]
    same = (low[0] <= end[0]) & (first[0] <= high[0])
    half = np.array(window)[:, None, None] // 2
    grown = reach / (half + 0.5)
    priority = grown.max(0) + 1e-3 * grown.mean(0) + np.where(same, 0, 1e6)
    return rank_pairs(layout, (reach <= half).all(0) & same, priority)
