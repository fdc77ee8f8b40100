"""What a few rows say of all others: they are computed densely too, and correct the rest.

Sparse attention errs alike in most rows of a head: what lies in blocks that nobody reads is missing
everywhere. Written as an affine function of its own output, fitted on a few probe rows,

    dense − sparse ≈ (sparse − x̄) W + ȳ,

that error is known for every row, and is added. W is a ridge regression for each head. How much of
it is believed follows from what it tells of probes that it was not made from (each left out once,
in closed form): 0 where rows have nothing in common, or where few of the probes count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jali import kernels
from jali.backends import dense
from jali.methods.method import FEWEST_PROBES, Query
from jali.methods.sampling import jittered_positions
from jali.planning.plan import BlockPlan
from jali.planning.scoring import at_least_fp32
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

RIDGE = 0.05  # of the mean square of an output's entries, less their mean
LEAST = 0.01  # of what a left-out probe does not decide itself
TINY = 1e-30
SEED = 0


class Probes(NamedTuple):
    """Rows of a call that were computed densely, in the layout's order."""

    rows: Tensor  # int64 [R]
    parts: Tensor  # [B, H, P, R, D], over P parts of the keys
    lse: Tensor | None  # fp32 [B, H, P, R], where there are several
    sparse: Tensor  # bool [B|1, H|1, M]: which query blocks do not read everything
    q_block: int
    padding: KeyPadding | None = None  # of queries too: those may hold anything

    @property
    def exact(self) -> Tensor:
        """[B, H, R, D]."""
        if self.lse is None:
            return self.parts[:, :, 0]
        share = self.lse.softmax(2).nan_to_num_(0.0)  # no part has a real key
        return (self.parts * share[..., None]).sum(2)

    def of_rows(self, tokens: int) -> Tensor:
        """Which queries do not read everything. bool [B|1, H|1, Sq, 1]."""
        return self.sparse.repeat_interleave(self.q_block, -1)[..., :tokens, None]

    def counted(self, tokens: int) -> Tensor:
        """Which probes are among those, and real. bool [B|1, H|1, R, 1]."""
        found = self.of_rows(tokens)[:, :, self.rows]
        if self.padding is None:
            return found
        return found & self.padding.valid(tokens)[:, self.rows][:, None, :, None]


def probe(query: Query, v: Tensor, plan: BlockPlan, count: int) -> Probes:
    """Attend densely from `count` rows, one at random out of each of as many stretches of the
    sequence; from all where there are no more. `plan` is what the others read."""
    q, k, padding, tokens = query.q, query.k, query.padding, query.layout.q.tokens
    at = jittered_positions(tokens, tokens, min(count, tokens), SEED, query.site, q.device)
    rows = at.flatten()
    lse: Tensor | None = None
    if _use_kernel(query, len(rows)):
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        length = padding and padding.length
        attention = kernels.load("correction").rows_attention
        parts, lse = attention(q, k, v, rows, query.scale, length)
    else:
        some = q.index_select(2, rows)
        parts = dense.stock(some, k, v, query.scale, padding)[:, :, None]
    own = padding if tokens == query.layout.k.tokens else None
    return Probes(rows, parts, lse, ~_reads_all(plan), plan.blocks.q, own)


def _use_kernel(query: Query, rows: int) -> bool:
    """Whether the Triton kernels can do this."""
    q, padding = query.q, query.padding
    if not kernels.available(q.device) or q.dtype == torch.float64:
        return False
    if padding is not None and padding.length is None:
        return False
    known: bool = kernels.load("correction").fits(q.device, rows, q.shape[3])
    return known


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
    if probes.lse is not None and out.stride(-1) == 1:
        found: Tensor = kernels.load("correction").correct_rows(
            out, probes.parts, probes.lse, probes.rows, probes.sparse, probes.q_block,
            probes.padding and probes.padding.length, RIDGE, LEAST, TINY, _rounding(out),
            FEWEST_PROBES,
        )  # fmt: skip
        return found
    tokens = out.shape[2]
    given = at_least_fp32(out.index_select(2, probes.rows))
    lacking = at_least_fp32(probes.exact) - given
    counted = probes.counted(tokens) & lacking.isfinite().all(-1, keepdim=True)
    number = counted.sum(2, keepdim=True).clamp_min(1)

    def centred(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.masked_fill(~counted, 0)
        mean = x.sum(2, keepdim=True) / number
        return (x - mean).masked_fill(~counted, 0), mean

    whole = given.masked_fill(~counted, 0).square().sum((2, 3)) / given.shape[3]
    x, x_mean = centred(given)
    y, y_mean = centred(lacking)
    square = x.mT @ x
    strength = RIDGE * square.diagonal(dim1=-2, dim2=-1).mean(-1) + _rounding(out) * whole + TINY
    strength = strength[..., None, None]
    square.diagonal(dim1=-2, dim2=-1).add_(strength.squeeze(-1))
    solved, _ = torch.linalg.solve_ex(square, x.mT)  # [B, H, D, R]
    weight = solved @ y
    own = (x * solved.mT).sum(-1, keepdim=True) + 1 / number  # how far a probe decides itself
    lacking = (y + y_mean).masked_fill(~counted, 0)
    told = lacking - (y - x @ weight).masked_fill(~counted, 0) / (1 - own).clamp_min(LEAST)
    believed = (lacking * told).sum((2, 3)) / told.square().sum((2, 3)).clamp_min(TINY)
    believed = torch.where(number.flatten(2).squeeze(-1) < FEWEST_PROBES, 0, believed)
    believed = believed.nan_to_num_(0.0).clamp_(0, 1)[..., None, None]
    weight, shift = (
        (some * believed).nan_to_num_(0.0, 0.0, 0.0) for some in (weight, y_mean - x_mean @ weight)
    )
    added = (at_least_fp32(out) @ weight).add_(shift).masked_fill_(~probes.of_rows(tokens), 0)
    corrected, most = added.add_(out), torch.finfo(out.dtype).max
    return out.copy_(torch.where(corrected.abs() <= most, corrected, out))  # else it left the range


def _rounding(out: Tensor) -> float:
    """The square of what an entry is rounded by: what differs less than that says nothing."""
    return torch.finfo(out.dtype).eps ** 2


def correction_share(layout: BlockLayout, count: int, dim: int) -> float:
    """What probes take, as a share of dense attention's arithmetic: their own rows over all keys,
    and for every row a product with a `dim` × `dim` matrix. The fit itself is nothing beside it."""
    rows = min(count, layout.q.tokens) / layout.q.tokens
    return rows + dim / (2 * layout.k.tokens)
