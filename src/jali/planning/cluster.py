"""Clusters of exactly one block: tokens halved again and again where they differ most."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from torch import Tensor

from jali.planning.scoring import at_least_fp32
from jali.tokens.head_order import take

# The power iteration looks at one token in four: a direction that is roughly right will do.
ROUNDS, SAMPLED = 8, 4
PRODUCTS = 2 * ROUNDS / SAMPLED + 1  # of a token with directions, in every halving


def balanced_order(x: Tensor, metric: Tensor | None, tokens: int, block: int) -> Tensor:
    """The first `tokens` of x [B, H, S, D] in an order whose blocks hold tokens that are alike; the
    others stay. int64 [B, H, S], a bijection.

    Halves are those on either side of the median along the direction of the largest variance, at a
    whole block. `metric` [B, H, D, D], the second moment of the vectors that x is multiplied with,
    makes that the variance of the products; without it distance decides.
    """
    order = torch.arange(x.shape[2], device=x.device).expand(x.shape[:3]).contiguous()
    for step in _halvings(tokens, block, x.device):
        parts, size = step.slots.shape
        here = order.index_select(2, step.slots.flatten())
        rows = at_least_fp32(take(x, here)).unflatten(2, (parts, size))
        place = _along(rows, metric).masked_fill(~step.real, torch.inf)
        here = here.view_as(place).gather(-1, place.argsort(dim=-1, stable=True))
        order[..., :tokens] = here.flatten(2).index_select(2, step.back)
    return order


def second_moment(x: Tensor, groups: int) -> Tensor:
    """Mean of xxᵀ over tokens of x [B, H, S, D] and heads of each group. [B, groups, D, D]."""
    x = at_least_fp32(x).unflatten(1, (groups, -1)).flatten(2, 3)
    return x.mT @ x / x.shape[2]


def _along(rows: Tensor, metric: Tensor | None) -> Tensor:
    """Where rows [..., L, D] lie along their main direction. Finite, [..., L]."""
    some = rows[..., :: min(SAMPLED, max(1, rows.shape[-2] // 64)), :]
    some = some - some.mean(-2, keepdim=True)
    direction = some.square().sum(-2)[..., None]
    for _ in range(ROUNDS):
        direction = some.mT @ (some @ direction)
        if metric is not None:
            direction = metric[:, :, None] @ direction
        largest = direction.abs().amax(-2, keepdim=True)
        direction = direction / largest.clamp_min(torch.finfo(rows.dtype).tiny)
    return (rows @ direction)[..., 0].nan_to_num(nan=0.0)


class _Halving:
    """One level: the slots of every part [parts, L], short ones filled up with their last; which of
    these are `real` [parts, L]; and where every slot is among them."""

    def __init__(self, edges: list[int], device: torch.device) -> None:
        starts, ends = np.array(edges[:-1])[:, None], np.array(edges[1:])[:, None]
        slots = starts + np.arange((ends - starts).max())
        real = slots < ends
        self.slots = torch.from_numpy(np.minimum(slots, ends - 1)).to(device)
        self.real = torch.from_numpy(real).to(device)
        self.back = torch.from_numpy(np.flatnonzero(real)).to(device)


@functools.lru_cache(maxsize=64)
def _halvings(tokens: int, block: int, device: torch.device) -> tuple[_Halving, ...]:
    """Until every part is a block."""
    found, edges = [], [0, -(-tokens // block)]
    while max(np.diff(edges), default=0) > 1:
        found.append(_Halving([min(tokens, edge * block) for edge in edges], device))
        middles = [(a + b) // 2 for a, b in itertools.pairwise(edges)]
        edges = sorted({*edges, *middles})
    return tuple(found)
