"""From scores to plans: which blocks are kept. Exact, deterministic, never waiting."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jali import kernels
from jali.kernels.lists import BlockList
from jali.planning.plan import SKIP, BlockPlan
from jali.tokens.layout import BlockLayout


def ranks(scores: Tensor, forced: Tensor | None = None) -> Tensor:
    """Rank of every key block in its row, from 0: forced blocks first, then by score.

    Ties go to the lower index; NaN ranks last. scores [B, H, M, N], forced bool broadcastable.
    """
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if forced is not None:
        scores = torch.where(forced, torch.inf, scores)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    slot = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, slot)


def keep_top(
    scores: Tensor,
    keep: Tensor | int,
    layout: BlockLayout,
    forced: Tensor,
    full_rows: Tensor | None = None,
    causal: bool = False,
) -> BlockPlan:
    """Read the best `keep` key blocks of every query block.

    scores [B, H, M, N]; keep: an int, or int [B, H], [B, H, 1, 1] or [B, H, M, 1]. Forced blocks
    (bool [M, N]) count inside it and displace the weakest; where they are more than `keep`, the
    row reads them all. `full_rows` (bool [M]) read everything. A causal plan reads nothing ahead.
    """
    if _use_kernels(scores) and not causal:
        return _keep_top_by_kernel(scores, keep, layout, forced, full_rows)
    if isinstance(keep, Tensor) and keep.dim() == 2:
        keep = keep[..., None, None]
    if causal:
        forced = forced & layout.causal
        scores = scores.masked_fill(~layout.causal, -torch.inf)
    kept = (ranks(scores, forced) < keep) | forced | _at_least_one(forced, scores)
    if full_rows is not None:
        kept = kept | full_rows[:, None]
    if causal:
        kept = kept & layout.causal
    return BlockPlan(layout, (1,), map=kept.to(torch.uint8), causal=causal)


def _use_kernels(scores: Tensor) -> bool:
    """Whether the Triton kernels can do this: they rank rows of up to 4,096 blocks."""
    if scores.dtype != torch.float32 or scores.shape[-1] > 4096:
        return False
    return kernels.available(scores.device)


def _keep_top_by_kernel(
    scores: Tensor,
    keep: Tensor | int,
    layout: BlockLayout,
    forced: Tensor,
    full_rows: Tensor | None,
) -> BlockPlan:
    if isinstance(keep, int):
        keep = _one_for_all(keep, scores.device)
    elif keep.dim() == 4:  # per head [B, H, 1, 1] or per row [B, H, M, 1]
        keep = keep.squeeze(-1).squeeze(-1) if keep.shape[2] == 1 else keep.squeeze(-1)
    if keep.dtype != torch.int32:
        keep = keep.to(torch.int32)
    counts, indices = kernels.load("selection").select_lists(scores, keep, forced, full_rows)
    return BlockPlan(layout, (1,), given={1: BlockList(counts, indices)})


@functools.lru_cache(maxsize=256)
def _one_for_all(keep: int, device: torch.device) -> Tensor:
    return torch.tensor(keep, dtype=torch.int32, device=device)


def _at_least_one(forced: Tensor, scores: Tensor) -> Tensor:
    """The best block of the rows where nothing is forced. (Without an own block, a keep of 0
    would leave a row that reads nothing.)"""
    best = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).argmax(-1, keepdim=True)
    found = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return found & ~forced.any(-1, keepdim=True)


def count_to_reach(scores: Tensor, share: float, forced: Tensor | None = None) -> Tensor:
    """How many of the best blocks hold at least `share` of a row's mass. int64 [B, H, M, 1].

    Forced blocks come first, and their mass counts. Scores are masses: 0..1.
    """
    if _use_kernels(scores):
        bound = _on_device((share,), scores.device)
        ends = kernels.load("selection").cumulative_ends(
            scores, bound, crossing=False, forced=forced
        )
        return 1 + ends.clamp_max(scores.shape[-1] - 1)
    ranked = scores if forced is None else torch.where(forced, scores + 2.0, scores)
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    mass = scores.gather(-1, order).double().cumsum(-1)
    total = mass[..., -1:]
    # The last bit of a sum must not decide whether a whole block is read.
    return 1 + (mass < share * total - 1e-9 * total).sum(-1, keepdim=True)


def keep_pyramid(
    scores: Tensor,
    layout: BlockLayout,
    levels: tuple[int, ...],
    bounds: tuple[float, ...],
    floor: float | None,
    cap: Tensor | None,
    ratios: tuple[int, ...],
    multiples: tuple[int, ...] | None = None,
) -> BlockPlan:
    """Rank blocks by score, forced ones first, and read each at the level whose bound it lies
    before.

    Bounds are shares of ranked blocks, or with a `floor` shares of cumulative score (see
    `cumulative_ends`). `cap` uint8 [B, H, N] is the coarsest ratio a key block may be read at;
    `ratios` are all that may come of it. With `multiples` the ranked blocks of a level are a
    multiple of its number there (see `align_ends`). Own and text blocks are read in full, text
    reads everything, and no row reads nothing.
    """
    least = None if floor is None else min(layout.N, int(floor * layout.N) + 1)
    if _use_kernels(scores):
        selection = kernels.load("selection")
        if least is None:
            ends = quantile_ends(layout.N, bounds, scores.device, multiples)
        else:
            at = _on_device(bounds, scores.device)
            ends = selection.cumulative_ends(scores, at, least, forced=layout.forced)
            ends = _align_rows(ends, multiples, layout)
        rows = layout.text_rows if layout.has_text_rows else None
        lists = selection.list_levels(scores, ends, levels, ratios, layout.forced, rows, cap)
        return BlockPlan(layout, ratios, given=lists)
    rank = ranks(scores, layout.forced)
    if least is None:
        ends = quantile_ends(layout.N, bounds, scores.device, multiples)
    else:
        ends = cumulative_ends(scores, rank, bounds, least)
        ends = _align_rows(ends, multiples, layout)
    return BlockPlan(layout, ratios, map=protect(levels_by_rank(rank, ends, levels), layout, cap))


def protect(levels: Tensor, layout: BlockLayout, cap: Tensor | None) -> Tensor:
    """Apply the cap; read own and text blocks in full; let text read everything, and a row that
    would read nothing its first block."""
    if cap is not None:
        levels = torch.minimum(levels, cap[:, :, None])
    full = layout.forced | layout.text_rows[:, None]
    levels = torch.where(full, 1, levels).to(torch.uint8)
    if not layout.has_own:  # no own blocks
        unread = (levels == SKIP).all(-1, keepdim=True)
        levels[..., :1] = torch.where(unread, 1, levels[..., :1])
    return levels


@functools.lru_cache(maxsize=64)
def quantile_ends(
    blocks: int,
    bounds: tuple[float, ...],
    device: torch.device,
    multiples: tuple[int, ...] | None = None,
) -> Tensor:
    """How many ranked blocks lie before each bound: ⌊bound · blocks⌋. int32 [R]."""
    # Aligned levels are PSA's, where the last bit of a product may cost a block.
    slack = 1e-9 if multiples is None else 0.0
    ends = torch.tensor([int(blocks * bound + slack) for bound in bounds], dtype=torch.int32)
    return (ends if multiples is None else align_ends(ends, multiples, blocks)).to(device)


def align_ends(ends: Tensor, multiples: tuple[int, ...], blocks: int) -> Tensor:
    """Ends of levels [..., R] moved so that the level i holds a multiple of `multiples[i]` blocks.

    Each level begins where the one before it now ends. Its length is rounded up; where that would
    reach the last block, down, and the rest is left to the next level.
    """
    aligned, start = [], torch.zeros_like(ends[..., 0])
    for i, multiple in enumerate(multiples):
        length = (ends[..., i] - start).clamp_min(0)
        up = (length + multiple - 1) // multiple * multiple
        down = (blocks - start) // multiple * multiple
        start = start + torch.where(start + up >= blocks, down, up)
        aligned.append(start)
    return torch.stack(aligned, dim=-1)


def _align_rows(ends: Tensor, multiples: tuple[int, ...] | None, layout: BlockLayout) -> Tensor:
    """Forced blocks have no order among themselves: a bound inside them is one behind them."""
    if multiples is None:
        return ends
    forced = layout.forced.sum(-1, keepdim=True, dtype=ends.dtype)
    return align_ends(torch.maximum(ends, forced), multiples, layout.N)


@functools.lru_cache(maxsize=64)
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def cumulative_ends(scores: Tensor, rank: Tensor, bounds: tuple[float, ...], least: int) -> Tensor:
    """How many ranked blocks lie before each bound on cumulative importance. int64 [B, H, M, R].

    The block that crosses a bound is included; a bound below the first block's importance is
    empty. At least `least` blocks lie before the first bound.
    """
    N = scores.shape[-1]
    ranked = torch.empty_like(scores).scatter_(-1, rank, scores).double()
    share = ranked.cumsum(-1)
    share = share / share[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    ends = []
    for bound in bounds:
        inside = (share <= bound + 1e-6).sum(-1)
        ends.append(torch.where(inside > 0, inside + 1, 0).clamp_max(N))
    ends[0] = ends[0].clamp_min(least)
    return torch.stack(ends, dim=-1).cummax(-1).values


def levels_by_rank(rank: Tensor, ends: Tensor, ratios: tuple[int, ...]) -> Tensor:
    """Levels from ranks: the first ratio whose end lies behind the rank, else skip.

    rank [B, H, M, N]; ends [..., R], ascending, broadcastable to [B, H, M, R]. uint8 [B, H, M, N].
    """
    levels = torch.zeros_like(rank, dtype=torch.uint8)
    for i in reversed(range(len(ratios))):
        levels = torch.where(rank < ends[..., i, None], ratios[i], levels)
    return levels.to(torch.uint8)
