"""A column order for logit tiles in which reducing over a run of keys stays inside one thread.

In the accumulator of NVIDIA's matrix instructions one thread holds, of every 8 columns, 2
neighbours. A tile of `keys` columns is therefore seen as [high, low, 4, 2], and run `high * 4 +
lane` gets the `2 * low` columns of one lane: its maximum or sum needs no exchange between threads.
Which key sits in which column never changes a result, only its cost.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def interleaved_key(column, RUN: tl.constexpr, KEYS: tl.constexpr):
    """Which key of the tile (run * RUN + member) belongs in `column`."""
    if RUN * 4 <= KEYS and RUN >= 2:
        low = RUN // 2
        octet = column // 8
        run = (octet // low) * 4 + (column % 8) // 2
        member = (octet % low) * 2 + column % 2
        key = run * RUN + member
    else:  # fewer than four runs in a tile: keep the natural order
        key = column
    return key


@triton.jit
def interleaved_column(key, RUN: tl.constexpr, KEYS: tl.constexpr):
    """The inverse of `interleaved_key`: the column that holds `key` of the tile."""
    if RUN * 4 <= KEYS and RUN >= 2:
        low = RUN // 2
        run = key // RUN
        member = key % RUN
        column = ((run // 4) * low + member // 2) * 8 + (run % 4) * 2 + member % 2
    else:
        column = key
    return column


@triton.jit
def run_max(tile, ROWS: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr):
    """Maximum over each run of an interleaved tile: [ROWS, KEYS] -> [ROWS, KEYS // RUN]."""
    if RUN * 4 <= KEYS and RUN >= 2:
        view = tl.reshape(tile, [ROWS, KEYS // (4 * RUN), RUN // 2, 4, 2])
        result = tl.reshape(tl.max(tl.max(view, 4), 2), [ROWS, KEYS // RUN])
    else:
        result = tl.max(tl.reshape(tile, [ROWS, KEYS // RUN, RUN]), 2)
    return result


@triton.jit
def run_sum(tile, ROWS: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr):
    """Sum over each run of an interleaved tile: [ROWS, KEYS] -> [ROWS, KEYS // RUN]."""
    if RUN * 4 <= KEYS and RUN >= 2:
        view = tl.reshape(tile, [ROWS, KEYS // (4 * RUN), RUN // 2, 4, 2])
        result = tl.reshape(tl.sum(tl.sum(view, 4), 2), [ROWS, KEYS // RUN])
    else:
        result = tl.sum(tl.reshape(tile, [ROWS, KEYS // RUN, RUN]), 2)
    return result
