"""What a few rows say of all others: they are computed densely too, and correct the rest.

Sparse attention errs alike in most rows of a head: what lies in blocks that nobody reads is missing
everywhere. Written as an affine function of its own output, fitted on a few probe rows,

    dense − sparse ≈ (sparse − x̄) W + ȳ,

that error is known for every row, and is added. W is a ridge regression for each head. How much of
it is believed follows from what it tells of probes that it was not made from (each left out once,
in closed form): 0 where rows have nothing in common.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jali.backends import dense
from jali.methods.method import Query
from jali.methods.sampling import jittered_positions
from jali.planning.plan import BlockPlan
from jali.planning.scoring import at_least_fp32
from jali.tokens.layout import BlockLayout

RIDGE = 0.05  # of the mean square of an output's entries
LEAST = 0.01  # of what a left-out probe does not decide itself
TINY = 1e-30
SEED = 0


class Probes(NamedTuple):
    """Rows of a call that were computed densely, in the layout's order."""

    rows: Tensor  # int64 [R]
    exact: Tensor  # [B, H, R, D]
    counted: Tensor  # bool [B|1, H|1, R, 1]: those of real queries that do not read everything
    sparse: Tensor  # bool [B|1, H|1, Sq, 1]: which queries do not


def probe(query: Query, v: Tensor, plan: BlockPlan, count: int) -> Probes:
    """Attend densely from `count` rows, one at random out of each of as many stretches of the
    sequence; from all where there are no more. `plan` is what the others read."""
    q, tokens = query.q, query.layout.q.tokens
    at = jittered_positions(tokens, tokens, min(count, tokens), SEED, query.site, q.device)
    rows = at.flatten()
    exact = dense.stock(q.index_select(2, rows), query.k, v, query.scale, query.padding)
    sparse = ~_reads_all(plan).repeat_interleave(plan.blocks.q, -1)[..., :tokens, None]
    counted = sparse[:, :, rows]
    if query.padding is not None and tokens == query.layout.k.tokens:  # may hold anything
        counted = counted & query.padding.valid(tokens)[:, rows][:, None, :, None]
    return Probes(rows, exact, counted, sparse)


def _reads_all(plan: BlockPlan) -> Tensor:
    """Which query blocks read every key block in full, as text does. bool [B|1, H|1, M]."""
    if plan.given is None:
        return (plan.levels == 1).all(-1)
    if 1 not in plan.ratios:
        return torch.zeros(1, 1, plan.layout.M, dtype=torch.bool, device=plan.layout.device)
    counts: Tensor = plan.given[1].counts
    return counts == plan.layout.N


def correct(out: Tensor, probes: Probes) -> Tensor:
    """Add to every row of a sparse output [B, H, Sq, D] what the probes say it lacks, in place."""
    given = at_least_fp32(out.index_select(2, probes.rows))
    lacking = at_least_fp32(probes.exact) - given
    counted = probes.counted & lacking.isfinite().all(-1, keepdim=True)
    number = counted.sum(2, keepdim=True).clamp_min(1)

    def centred(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.masked_fill(~counted, 0)
        mean = x.sum(2, keepdim=True) / number
        return (x - mean).masked_fill(~counted, 0), mean

    x, x_mean = centred(given)
    y, y_mean = centred(lacking)
    square = x.mT @ x
    strength = RIDGE * square.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] + TINY
    square.diagonal(dim1=-2, dim2=-1).add_(strength.squeeze(-1))
    solved, _ = torch.linalg.solve_ex(square, x.mT)  # [B, H, D, R]
    weight = solved @ y
    own = (x * solved.mT).sum(-1, keepdim=True) + 1 / number  # how far a probe decides itself
    lacking = (y + y_mean).masked_fill(~counted, 0)
    told = lacking - (y - x @ weight).masked_fill(~counted, 0) / (1 - own).clamp_min(LEAST)
    believed = (lacking * told).sum((2, 3)) / told.square().sum((2, 3)).clamp_min(TINY)
    believed = torch.where(number.flatten(2).squeeze(-1) < 2, 0, believed)  # one leaves none out
    believed = believed.nan_to_num_(0.0).clamp_(0, 1)[..., None, None]
    weight, shift = (
        (some * believed).nan_to_num_(0.0, 0.0, 0.0).to(out.dtype)
        for some in (weight, y_mean - x_mean @ weight)
    )
    added = (out @ weight).add_(shift)
    return out.addcmul_(added, probes.sparse.to(out.dtype))


def correction_share(layout: BlockLayout, count: int) -> float:
    """What probes take, as a share of dense attention's arithmetic."""
    return min(1.0, count / layout.q.tokens)
