"""From scores to ascending block lists: exact top-k per row with forced blocks and full rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .score_tiles import power_of_two
from .select_rank import HIGHEST, kth_key, ordered_keys, running_counts


@triton.jit
def _select_lists_kernel(
    scores,
    keep,
    forced,
    full_rows,
    counts,
    indices,
    m,
    n,
    width,
    keep_slot,
    keep_row,
    N_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_FULL: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.program_id(1)
    column = tl.arange(0, N_PAD)
    real = column < n
    line = slot.to(tl.int64) * m + row
    key = ordered_keys(tl.load(scores + line * n + column, mask=real, other=float("nan")))
    k = tl.maximum(tl.load(keep + slot * keep_slot + row * keep_row), 1)
    if HAS_FORCED:
        must = tl.load(forced + row * n + column, mask=real, other=0) != 0
        key = tl.where(must, HIGHEST, key)
        k = tl.maximum(k, tl.sum(must.to(tl.int32), 0))
    if HAS_FULL:
        k = tl.where(tl.load(full_rows + row) != 0, n, k)
    k = tl.minimum(k, n)
    cut = kth_key(key, k)
    above, equal = running_counts(key, cut)
    ties = k - tl.max(above, 0)
    chosen = real & ((key > cut) | ((key == cut) & (equal <= ties)))
    place = above + tl.minimum(equal, ties) - 1
    k = tl.minimum(k, width)
    tl.store(counts + line, k)
    tl.store(indices + line * width + place, column, mask=chosen & (place < width))
    # What lies behind the count is never read, but stays a valid index whoever reads it.
    rest = tl.arange(0, W_PAD)
    tl.store(indices + line * width + rest, 0, mask=(rest >= k) & (rest < width))


def select_lists(
    scores: Tensor,
    keep: Tensor,
    forced: Tensor | None = None,
    full_rows: Tensor | None = None,
    width: int | None = None,
    *,
    warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The `keep` best key blocks of every row, ascending.

    scores [B,H,M,N] fp32 (N <= 4096; NaN ranks last), keep int32 [B,H] or [B,H,M]. `forced`
    bool/uint8 [M,N] blocks come first and count inside `keep`; a row with more of them keeps them
    all. `full_rows` bool/uint8 [M] read every block. Equal scores go to the lower index. Returns
    counts int32 [B,H,M], at least 1, and indices int32 [B,H,M,W] with W = `width` or N: entries
    behind the count are 0. A `width` below a row's count cuts the row short.
    """
    batch, heads, m, n = scores.shape
    if n > 4096:
        raise ValueError(f"rows of at most 4096 key blocks, got {n}")
    width = n if width is None else max(1, min(width, n))
    n_pad = power_of_two(n)
    counts = torch.empty(batch, heads, m, dtype=torch.int32, device=scores.device)
    indices = torch.empty(batch, heads, m, width, dtype=torch.int32, device=scores.device)
    _select_lists_kernel[(m, batch * heads)](
        scores.contiguous(),
        keep.contiguous(),
        as_bytes(forced),
        as_bytes(full_rows),
        counts,
        indices,
        m,
        n,
        width,
        1 if keep.dim() == 2 else m,
        0 if keep.dim() == 2 else 1,
        N_PAD=n_pad,
        W_PAD=power_of_two(width),
        HAS_FORCED=forced is not None,
        HAS_FULL=full_rows is not None,
        num_warps=warps or row_warps(n_pad),
    )
    return counts, indices


@triton.jit
def _level_lists_kernel(levels, counts, indices, n, ratio, N_PAD: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N_PAD)
    level = tl.load(levels + line * n + column, mask=column < n, other=0).to(tl.int32)
    chosen = (level == ratio) & (column < n)
    place = tl.cumsum(chosen.to(tl.int32), 0)
    count = tl.max(place, 0)
    tl.store(counts + line, count)
    tl.store(indices + line * n + place - 1, column, mask=chosen)
    tl.store(indices + line * n + column, 0, mask=(column >= count) & (column < n))


def levels_to_lists(levels: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """The blocks read at `ratio`, ascending: levels uint8 [B,H,M,N] -> counts [B,H,M], indices.

    indices int32 [B,H,M,N]; entries behind the count are 0. A count may be 0.
    """
    batch, heads, m, n = levels.shape
    n_pad = power_of_two(n)
    counts = torch.empty(batch, heads, m, dtype=torch.int32, device=levels.device)
    indices = torch.empty(batch, heads, m, n, dtype=torch.int32, device=levels.device)
    _level_lists_kernel[(batch * heads * m,)](
        levels.contiguous(), counts, indices, n, ratio, N_PAD=n_pad, num_warps=row_warps(n_pad)
    )
    return counts, indices


def as_bytes(flags: Tensor | None) -> Tensor | None:
    """Flags as contiguous uint8 without a copy where they already are bytes."""
    if flags is None:
        return None
    flags = flags.contiguous()
    return flags.view(torch.uint8) if flags.dtype == torch.bool else flags


def row_warps(n_pad: int) -> int:
    """One warp per row avoids barriers as long as a row fits its registers."""
    return 1 if n_pad <= 1024 else n_pad // 1024
