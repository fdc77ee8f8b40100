"""Block importance on the GPU: one fp32 score per (query block, key block), four ways to get it."""

from __future__ import annotations

from .score_antidiagonal import antidiagonal_scores
from .score_means import block_mean_pair, block_means, mean_scores
from .score_peaks import sampled_peak_scores
from .score_sampled import sampled_scores
from .score_tiles import Tile

__all__ = [
    "Tile",
    "antidiagonal_scores",
    "block_mean_pair",
    "block_means",
    "mean_scores",
    "sampled_peak_scores",
    "sampled_scores",
]
