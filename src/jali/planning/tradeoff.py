"""Levels that cost a budget and err least: one price of work for all heads and rows of a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jali import kernels
from jali.planning.cost import read_sizes
from jali.planning.distortion import PER_OCTAVE, ErrorTable
from jali.planning.plan import SKIP, BlockPlan
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

OCTAVES = range(-126, 127)  # prices are normal fp32 numbers
PER_PRICE_OCTAVE = 256  # a price is exact to 0.3 %
BINS = len(OCTAVES) * PER_PRICE_OCTAVE
UNIT = 2**16  # of a block's work: whole numbers add up to the same in any order

Sum = Callable[[Tensor], Tensor]
Costs = tuple[tuple[int, float], ...]  # of levels, as shares of reading a block in full


def choose_plan(
    table: ErrorTable,
    layout: BlockLayout,
    ratios: tuple[int, ...],
    budget: float | None = None,
    price: float | None = None,
    padding: KeyPadding | None = None,
    total_over_ranks: Sum | None = None,
    costs: Costs = (),
) -> BlockPlan:
    """The plan of `choose_levels`, written as lists by kernels where they can run."""
    asked_less = price is not None or (budget is not None and budget < 1)
    if not (asked_less and kernels.available(table.codes.device) and layout.N <= 4096):
        levels = choose_levels(
            table, layout, budget, price, padding, total_over_ranks, costs
        )  # fmt: skip
        return BlockPlan(layout, ratios, map=levels)
    facts = _facts(layout, table.levels, padding, costs)
    if price is None:
        assert budget is not None
        if table.left is None:
            table = with_left(table, layout, padding, total_over_ranks, costs)
        assert table.left is not None
        prices = _price(table.left, budget)
    else:
        prices = facts.work.new_full((table.codes.shape[0],), price)
    lists = kernels.load("selection").list_cheapest(
        *_looked_at(table, layout, facts), prices, table.levels, PER_OCTAVE,
        layout.offset is not None,
    )  # fmt: skip
    return BlockPlan(layout, ratios, given=lists)


def with_left(
    table: ErrorTable,
    layout: BlockLayout,
    padding: KeyPadding | None = None,
    total_over_ranks: Sum | None = None,
    costs: Costs = (),
) -> ErrorTable:
    """The table with what is left of the work at every price, by kernels where they can run:
    whoever keeps a table asks for it once, and then for levels at many budgets."""
    if not (kernels.available(table.codes.device) and layout.N <= 4096):
        return table
    facts = _facts(layout, table.levels, padding, costs)
    saved = kernels.load("selection").saved_by_price(
        *_looked_at(table, layout, facts), facts.units, facts.rows, table.levels, BINS, PER_OCTAVE,
        OCTAVES.start, PER_PRICE_OCTAVE,
    )  # fmt: skip
    return table._replace(left=_left(saved, facts.dense, table.codes.shape[1], total_over_ranks))


def _looked_at(table: ErrorTable, layout: BlockLayout, facts: _Facts) -> tuple[Any, ...]:
    """What both kernels read."""
    mixed = layout.mixed_keys if layout.has_mixed_keys else None
    codes, top = table.codes.contiguous(), table.top.contiguous()
    return codes, top, facts.spread, mixed, facts.fixed, facts.work


def choose_levels(
    table: ErrorTable,
    layout: BlockLayout,
    budget: float | None = None,
    price: float | None = None,
    padding: KeyPadding | None = None,
    total_over_ranks: Sum | None = None,
    costs: Costs = (),
) -> Tensor:
    """Each block's level by the least error + price · work. uint8 [B, H, M, N].

    The price is found for every sample, so that its rows cost `budget` of dense attention, or is
    given. Own and text blocks are read in full, and rows of text read everything; those rows do
    not count in the budget. `total_over_ranks` sums over ranks that hold other heads. A level of
    `costs` counts as that share of reading in full instead of its work, in the budget too.
    """
    if budget is not None and price is None and budget >= 1:
        return torch.ones_like(table.codes[..., 0])  # also where a coarser level errs by nothing
    facts = _facts(layout, table.levels, padding, costs)
    errors = _errors(table, layout)
    if price is None:
        assert budget is not None
        left = table.left
        if left is None:
            left = _left(_saved(errors, facts), facts.dense, errors.shape[1], total_over_ranks)
        price_b = _price(left, budget)
    else:
        price_b = errors.new_full((errors.shape[0],), price)
    best = _best(errors, facts.work, facts.fixed, price_b)
    chosen = _on_device((1, *table.levels), layout.device)[best]
    if not layout.has_own:  # no own blocks: a row must read something
        nothing = (chosen == SKIP).all(-1, keepdim=True)
        worst = errors[..., -1].argmax(-1, keepdim=True)
        first = torch.zeros_like(nothing.expand_as(chosen)).scatter_(-1, worst, True)
        chosen = torch.where(nothing & first, 1, chosen)
    return chosen


class _Facts(NamedTuple):
    """What is the same for all tables of a layout."""

    work: Tensor  # share of a whole block that a level reads, or costs; fp32 [B|1, N, 1 + L]
    units: Tensor  # the same in whole numbers
    fixed: Tensor  # bool [M, N], what is read in full
    rows: Tensor  # int64 [M], how many count
    dense: Tensor  # units of a head that reads everything; int64 [B|1]
    spread: Tensor


@functools.lru_cache(maxsize=16)
def _facts(
    layout: BlockLayout, levels: tuple[int, ...], padding: KeyPadding | None, costs: Costs
) -> _Facts:
    work = _work(layout, levels, padding, costs)
    units = (work * UNIT).round().long()
    rows = layout.row_sizes
    if layout.counted_rows is not None:
        rows = rows * layout.counted_rows
    fixed = layout.forced | layout.text_rows[:, None]
    dense = rows.sum() * units[..., 0].sum(-1)
    factors = spread(layout.M, layout.N, PER_OCTAVE, layout.device)
    return _Facts(work.contiguous(), units.contiguous(), fixed, rows.long(), dense, factors)


def _errors(table: ErrorTable, layout: BlockLayout) -> Tensor:
    """With those of reading in full (none) before the others. [B, H, M, N, 1 + L]."""
    errors = table.errors() * spread(layout.M, layout.N, PER_OCTAVE, layout.device)[..., None]
    if layout.has_mixed_keys:
        pooled = _on_device(table.levels, layout.device) != SKIP
        errors = errors.masked_fill(layout.mixed_keys[:, None] & pooled, torch.inf)
    return torch.cat([torch.zeros_like(errors[..., :1]), errors], dim=-1)


# Once: a copy from the host waits for all that is under way on the device.
@functools.lru_cache(maxsize=16)
def _on_device(levels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=16)
def spread(M: int, N: int, per_octave: int, device: torch.device) -> Tensor:
    """A factor within one step of a code for every block pair, the same in every call. [M, N].

    Few bits make numbers equal that were not. Without it all of a code would be chosen, or none.
    """
    m, n = torch.arange(M, dtype=torch.float64)[:, None], torch.arange(N, dtype=torch.float64)
    place = (0.7548776662466927 * m + 0.5698402909980532 * n) % 1  # evenly spread over the plane
    return ((place - 0.5) / per_octave).exp2().float().to(device)


def _work(
    layout: BlockLayout, levels: tuple[int, ...], padding: KeyPadding | None, costs: Costs
) -> Tensor:
    ratios = (1, *(level for level in levels if level != SKIP))
    work = read_sizes(layout, ratios, padding).movedim(0, -1).float() / layout.blocks.k
    for level, cost in costs:
        if level in ratios:
            work[..., ratios.index(level)] = work[..., 0] * cost
    return F.pad(work, (0, 1)) if SKIP in levels else work


def _best(errors: Tensor, work: Tensor, fixed: Tensor, price: Tensor) -> Tensor:
    """Where error + price · work is least; 0 (in full) where it is fixed. int64 [B, H, M, N]."""
    best = (errors + price[:, None, None, None, None] * work[:, None, None]).argmin(-1)
    return best.masked_fill_(fixed, 0)


def _left(saved: Tensor, dense: Tensor, heads: int, total: Sum | None) -> Tensor:
    """The share of all work that is left at every price, falling. fp32 [B, BINS]."""
    if total is not None:
        whole = (heads * dense).expand(len(saved))[:, None]
        both = total(torch.cat([saved, whole], dim=1))  # of all heads
        saved, whole = both[:, :-1], both[:, -1:]
    else:
        whole = (heads * dense)[:, None]
    return ((whole - saved.cumsum(1)).double() / whole).float()


def _price(left: Tensor, budget: float) -> Tensor:
    """The lowest price at which every sample costs no more than the budget. fp32 [B]."""
    found = (left > budget).sum(1).clamp_max(BINS - 1)
    return (found / PER_PRICE_OCTAVE + OCTAVES.start).exp2()


def _saved(errors: Tensor, facts: _Facts) -> Tensor:
    """What is saved at the prices at which blocks take the next coarser level of those that are
    ever best. int64 [B, BINS]."""
    B = errors.shape[0]
    units = facts.units
    saved = units.new_zeros(B * BINS)
    first = torch.arange(0, B * BINS, BINS, device=saved.device)[:, None, None, None]
    current = units[:, None, None, :, 0]
    for level in range(1, errors.shape[-1]):
        price, best = _turn(errors, facts.work, level)
        here = units[:, None, None, :, level]
        less = torch.where(best & ~facts.fixed, current - here, 0) * facts.rows[:, None]
        current = torch.where(best, here, current)
        place = ((price.log2() - OCTAVES.start) * PER_PRICE_OCTAVE).ceil_()
        place = place.clamp_(0, BINS - 1).long() + first
        saved.scatter_add_(0, place.flatten(), less.flatten())
    return saved.view(B, BINS)


def _turn(errors: Tensor, work: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """The price from which a level is better than all finer ones, and whether it is ever the best:
    whether no coarser one is better at that price. [B, H, M, N] each."""
    own, paid = errors[..., level, None], work[:, None, None, :, level, None]
    finer, coarser = slice(level), slice(level + 1, None)
    from_price = (own - errors[..., finer]) / (work[:, None, None, :, finer] - paid)
    low = from_price.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1)
    if level == errors.shape[-1] - 1:
        return low.clamp_min_(0), low < torch.inf
    to_price = (errors[..., coarser] - own) / (paid - work[:, None, None, :, coarser])
    high = to_price.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amin(-1)
    return low.clamp_min_(0), low < high
