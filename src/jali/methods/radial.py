"""Radial Attention: the farther two frames are apart, the narrower the band that is read."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jali.methods.method import kept_dense
from jali.methods.placed import Placed
from jali.planning.ranking import RankedPairs, rank_pairs
from jali.tokens.layout import BlockLayout
from jali.tokens.place import Places, frame_parts
from jali.value import check_amount


@dataclass(frozen=True)
class Radial(Placed):
    """Read neighbouring frames whole, and of others a band around a token's own place, half as
    wide whenever the distance doubles; where it would be narrower than a block, fewer frames.

    Args:
        decay_factor: on the width of the bands.
        first_frame: whether every row reads the whole first frame (theirs does for Wan).
        budget: share of the block pairs: bands widen or narrow to it.
        block_size: tokens in a block, and the least width of a band.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> attend(q, k, v, method=Radial(decay_factor=0.2), grid=(18, 48, 80))
    """

    decay_factor: float = 1.0
    first_frame: bool = True

    name: ClassVar[str] = "radial"
    own_schedule = kept_dense(0.24, (0,))  # 12 of 50 steps, and a layer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("decay_factor", self.decay_factor)

    def ranked(self, layout: BlockLayout) -> RankedPairs:
        return _ranked(layout, self.decay_factor, self.first_frame)


@functools.lru_cache(maxsize=16)
def _ranked(layout: BlockLayout, decay: float, first_frame: bool) -> RankedPairs:
    """By the decay factor at which the band holds a pair; frame by frame inside blocks."""
    rows, keys = frame_parts(layout)
    distance, alike = np.abs(rows.t[:, None] - keys.t), rows.box[:, None] == keys.box
    sink = (keys.t == 0) & first_frame
    # 2 to the power of a number's bits, halved as often as the distance has bits.
    length = 2.0 ** (np.frexp(keys.size)[1] - np.where(sink, 0, np.frexp(distance)[1]))
    width = np.floor(np.maximum(layout.blocks.k, length * decay))
    width = np.where(sink | (distance <= 1), keys.size, width)
    every = np.maximum(layout.blocks.k // length, 1)  # of frames so far away, one in so many
    read = alike & (sink | (distance % every == 0))
    top, bottom = rows.first[:, None], rows.last[:, None]

    def seen_by(count: Places | int) -> Places:
        """How many keys lie in the band of at least so many rows."""
        reach = width + 1 - count
        seen = np.minimum(keys.last, bottom + reach) - np.maximum(keys.first, top - reach) + 1
        return np.where(read, seen.clip(0), 0)

    def over_blocks(join: np.ufunc, found: Any) -> Any:
        return join.reduceat(join.reduceat(found, rows.blocks, axis=0), keys.blocks, axis=1)

    # A block is read where a third of the rows see most of the keys that any of them sees.
    pattern = seen_by((bottom - top + 1) // 3 + 1) > 0.6 * seen_by(1)
    middle = (top + bottom) / 2
    apart = np.abs(middle.clip(keys.first, keys.last) - middle) / length
    priority = apart + 1e6 * ~read + 1e9 * ~alike
    return rank_pairs(
        layout, over_blocks(np.logical_or, pattern), over_blocks(np.minimum, priority)
    )
