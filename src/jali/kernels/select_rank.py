"""Exact selection of the best entries of a row without sorting it.

Scores become integers in the same order, and the k-th largest is found bit by bit by counting. Ties
go to the lower index.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2147483648)
HIGHEST = tl.constexpr(2147483647)


@triton.jit
def ordered_keys(score):
    """int32 keys in the order of fp32 scores: -0.0 equals 0.0, NaN lies below everything."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, LOWEST, key)


@triton.jit
def kth_key(key, k):
    """The k-th largest key (k >= 1). Padding must be LOWEST and come last, so it never wins."""
    cut = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, LOWEST)
    for step in tl.range(0, 31):
        higher = cut + (1 << (30 - step))
        cut = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= k, higher, cut)
    return cut


@triton.jit
def running_counts(key, cut):
    """Per entry, how many up to and including it lie above `cut`, and how many equal it."""
    above = (key > cut).to(tl.int32)
    equal = (key == cut).to(tl.int32)
    # Rows hold at most 2^15 entries, so both counts share one scan.
    packed = tl.cumsum(above + (equal << 16), 0)
    return packed & 0xFFFF, packed >> 16
