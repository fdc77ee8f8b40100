"""Levels that cost a budget and err least: one price of work for all heads and rows of a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.planning.cost import read_sizes
from jali.planning.distortion import PER_OCTAVE, ErrorTable
from jali.planning.plan import SKIP
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

HALVINGS = 20  # of 253 octaves: a price is exact to 0.02 %

Sum = Callable[[Tensor], Tensor]


def choose_levels(
    table: ErrorTable,
    layout: BlockLayout,
    budget: float | None = None,
    price: float | None = None,
    padding: KeyPadding | None = None,
    total_over_ranks: Sum | None = None,
) -> Tensor:
    """Each block's level by the least error + price · work. uint8 [B, H, M, N].

    The price is found for every sample, so that its rows cost `budget` of dense attention, or is
    given. Own and text blocks are read in full, and rows of text read everything; those rows do
    not count in the budget. `total_over_ranks` sums over ranks that hold other heads.
    """
    if budget is not None and price is None and budget >= 1:
        return torch.ones_like(table.codes[..., 0])  # also where a coarser level errs by nothing
    errors, work = _errors(table, layout), _work(layout, table.levels, padding)
    fixed = layout.forced | layout.text_rows[:, None]
    if price is None:
        assert budget is not None
        price_b = _price(errors, work, fixed, layout, budget, total_over_ranks or (lambda x: x))
    else:
        price_b = errors.new_full((errors.shape[0],), price)
    best = _best(errors, work, fixed, price_b)
    chosen = _on_device((1, *table.levels), layout.device)[best]
    if layout.offset is None:  # no own blocks: a row must read something
        nothing = (chosen == SKIP).all(-1, keepdim=True)
        worst = errors[..., -1].argmax(-1, keepdim=True)
        first = torch.zeros_like(nothing.expand_as(chosen)).scatter_(-1, worst, True)
        chosen = torch.where(nothing & first, 1, chosen)
    return chosen


def _errors(table: ErrorTable, layout: BlockLayout) -> Tensor:
    """With those of reading in full (none) before the others. [B, H, M, N, 1 + L]."""
    errors = table.errors() * _spread(layout.M, layout.N, layout.device)[..., None]
    if layout.has_mixed_keys:
        pooled = _on_device(table.levels, layout.device) != SKIP
        errors = errors.masked_fill(layout.mixed_keys[:, None] & pooled, torch.inf)
    return torch.cat([torch.zeros_like(errors[..., :1]), errors], dim=-1)


# Once: a copy from the host waits for all that is under way on the device.
@functools.lru_cache(maxsize=16)
def _on_device(levels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=16)
def _spread(M: int, N: int, device: torch.device) -> Tensor:
    """A factor within one step of a code for every block pair, the same in every call. [M, N].

    Bytes make errors equal that were not. Without it all of a code would be chosen, or none.
    """
    m, n = torch.arange(M, dtype=torch.float64)[:, None], torch.arange(N, dtype=torch.float64)
    place = (0.7548776662466927 * m + 0.5698402909980532 * n) % 1  # evenly spread over the plane
    return ((place - 0.5) / PER_OCTAVE).exp2().float().to(device)


@functools.lru_cache(maxsize=16)
def _work(layout: BlockLayout, levels: tuple[int, ...], padding: KeyPadding | None) -> Tensor:
    """Share of a whole block that a level reads. fp32 [B|1, N, 1 + L]."""
    read = read_sizes(layout, (1, *(level for level in levels if level != SKIP)), padding)
    work = read.movedim(0, -1).float() / layout.blocks.k
    return F.pad(work, (0, 1)) if SKIP in levels else work


def _best(errors: Tensor, work: Tensor, fixed: Tensor, price: Tensor) -> Tensor:
    """Where error + price · work is least; 0 (in full) where it is fixed. int64 [B, H, M, N]."""
    best = (errors + price[:, None, None, None, None] * work[:, None, None]).argmin(-1)
    return best.masked_fill_(fixed, 0)


def _price(
    errors: Tensor, work: Tensor, fixed: Tensor, layout: BlockLayout, budget: float, total: Sum
) -> Tensor:
    """The lowest price at which every sample costs no more than the budget. fp32 [B]."""
    rows = layout.row_sizes.float()
    if layout.counted_rows is not None:
        rows = rows * layout.counted_rows
    # Work of the counted rows of all heads, here and on other ranks.
    dense = total(errors.new_full((1,), errors.shape[1])) * rows.sum() * work[..., 0].sum(-1)
    low = errors.new_full((errors.shape[0],), -126.0)
    high = errors.new_full((errors.shape[0],), 127.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        best = _best(errors, work, fixed, middle.exp2())
        read = work[:, None, None].expand(*best.shape, -1).gather(-1, best[..., None])
        cost = (read.sum((-2, -1)) * rows).sum((1, 2))
        over = total(cost) > budget * dense
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return high.exp2()
