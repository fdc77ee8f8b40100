"""The table of errors half from samples, half from statistics.

Errors of a few rows that see all keys are right on average, but rows differ: what those few do not
look at seems to cost nothing. Statistics miss what lies inside groups of keys, for many rows. Their
mean keeps what either of them finds.
"""

from __future__ import annotations

from torch import Tensor

from jali.planning.distortion import ErrorTable, encode, error_table, samples_share
from jali.planning.statistics import statistics_share, statistics_table
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

EVERY = 4  # one of so many rows sees all keys


def mixed_table(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    positions: Tensor,
    levels: tuple[int, ...],
    padding: KeyPadding | None = None,
) -> ErrorTable:
    """Like `distortion.error_table`; all rows see statistics, a quarter of them all keys."""
    few = positions[:, ::EVERY]
    seen = error_table(q, k, v, layout, scale, few, levels, padding).errors()
    told = statistics_table(q, k, v, layout, scale, positions, levels, padding).errors()
    return encode(seen.lerp_(told, 0.5), levels)


def mixed_share(layout: BlockLayout, samples: int, levels: tuple[int, ...]) -> float:
    """Its arithmetic as a share of dense attention's."""
    few = -(-samples // EVERY)
    return samples_share(layout, few, levels) + statistics_share(layout, samples, levels)
