"""Exact selection of the best entries of a row without sorting it.

Scores become integers in the same order, and a cut that leaves k of them above it is found by
bisection, which ends as soon as it has found one. Ties go to the lower index.
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
def key_score(key):
    """The fp32 score behind one key."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def midpoint(low, high, step):
    """A key in (low, high] that halves the bracket: in turn the scores' mean and the keys' mean.

    The first is best within one order of magnitude, the second across many.
    """
    middle = (low | high) - ((low ^ high) >> 1)  # rounds up, without overflow
    mean = 0.5 * key_score(low) + 0.5 * key_score(high)
    guess = mean.to(tl.int32, bitcast=True)
    guess = tl.where(guess < 0, guess ^ 0x7FFFFFFF, guess)
    # Where the mean is no number, or rounds to the lower end, the keys' mean takes over.
    good = (step % 2 == 0) & (guess > low) & (guess <= high) & (mean == mean)
    return tl.where(good, guess, middle)


@triton.jit
def cut_of(key, real, k):
    """A key `cut` such that at most k (>= 1) real entries lie above it and at least k at or above.

    Also whether exactly k lie above, so that ties need no care. Forced entries have the key
    HIGHEST, and k is at least their number; padding has the key LOWEST and is not real.
    """
    forced = key == HIGHEST
    low = tl.min(tl.where(real, key, HIGHEST), 0)
    high = tl.max(tl.where(forced, LOWEST, key), 0)
    # Nothing left to rank: all of the row, or the forced entries alone.
    every = tl.sum(real.to(tl.int32), 0) <= k
    exact = tl.sum(forced.to(tl.int32), 0) == k
    cut = tl.where(every, low, high)
    exact &= ~every
    # From here on at least k entries are >= low and fewer than k are > high.
    high = tl.where(every | exact, low, high)
    step = 0
    while low < high:
        middle = midpoint(low, high, step)
        count = tl.sum((key >= middle).to(tl.int32), 0)
        exact = count == k
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
        high = tl.where(exact, low, high)
        cut = tl.where(exact, middle - 1, low)
        step += 1
    return cut, exact


@triton.jit
def running_counts(key, cut):
    """Per entry, how many up to and including it lie above `cut`, and how many equal it."""
    above = (key > cut).to(tl.int32)
    equal = (key == cut).to(tl.int32)
    # Rows hold at most 2^15 entries, so both counts share one scan.
    packed = tl.cumsum(above + (equal << 16), 0)
    return packed & 0xFFFF, packed >> 16


@triton.jit
def running_count(flags, N_PAD: tl.constexpr):
    """Per entry, how many flags are set up to and including it: bool [N_PAD] -> int32 [N_PAD].

    Entry 32 * r + lane is held by `lane`. Counts along the lanes need exchanges between threads, so
    four rows share each of them, a byte each; counts along the rows are cheap.
    """
    if N_PAD >= 128:
        GROUPS: tl.constexpr = N_PAD // 128
        shift = 8 * tl.arange(0, 4)
        view = tl.reshape(flags.to(tl.int32), [GROUPS, 4, 32])
        packed = tl.sum(view << shift[None, :, None], 1)
        lanes = tl.cumsum(packed, 1)
        rows = tl.sum(packed, 1)
        # Byte j of the product holds the rows before j; the highest byte of the second, all four.
        lanes += (rows * 0x01010100)[:, None]
        group = ((rows * 0x01010101) >> 24) & 0xFF
        before = tl.cumsum(group, 0) - group
        within = (lanes[:, None, :] >> shift[None, :, None]) & 0xFF
        count = tl.reshape(within + before[:, None, None], [N_PAD])
    else:
        count = tl.cumsum(flags.to(tl.int32), 0)
    return count
