"""Clusters of exactly one block: tokens halved again and again where they differ most."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jali.planning.sampled_output import long_product
from jali.planning.scoring import at_least_fp32
from jali.tokens.head_order import HeadOrders, take
from jali.tokens.layout import BlockLayout

# Directions are found from one token in four: one that is roughly right will do.
SAMPLED, SQUARINGS = 4, 3


class OrderTable(NamedTuple):
    """Orders of heads as they are kept: `codes` int32 [B, H, Sq] of the queries, k [B, Hkv, Sk]."""

    codes: Tensor
    k: Tensor
    levels: tuple[int, ...] = ()

    @classmethod
    def of(cls, orders: HeadOrders) -> OrderTable:
        return cls(orders.q.int(), orders.k.int())

    @property
    def orders(self) -> HeadOrders:
        return HeadOrders(self.codes.long(), self.k.long())

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.k.nbytes

    def filled_with(self, other: OrderTable) -> OrderTable:
        """The other's orders, of the same shape, in this one's memory."""
        self.codes.copy_(other.codes)
        self.k.copy_(other.k)
        return self


def clustered(q: Tensor, k: Tensor, layout: BlockLayout) -> HeadOrders:
    """Orders in which blocks of queries hold those that weigh keys alike, and blocks of keys those
    that are weighed alike. q [B, H, Sq, D], k [B, Hkv, Sk, D] with 0 for what is padding."""
    rows, kv = layout.q_grid.placed, k.shape[1]
    of_keys = second_moment(k, kv).repeat_interleave(q.shape[1] // kv, dim=1)
    of_rows = second_moment(q[:, :, :rows], kv)  # text may be padded as queries too
    return HeadOrders(
        balanced_order(q, of_keys, rows, layout.blocks.q),
        balanced_order(k, of_rows, layout.k_grid.placed, layout.blocks.k),
    )


def clusters_share(layout: BlockLayout) -> float:
    """The arithmetic of `clustered`, as a share of dense attention's, for heads of 128 dims."""
    rows, keys = layout.q.tokens, layout.k.tokens
    each = _products(rows, layout.blocks.q) / keys + _products(keys, layout.blocks.k) / rows
    return min(1.0, each / 2)  # dense attention has two for every pair


def _products(tokens: int, block: int, dim: int = 128) -> float:
    """With how many vectors each token is multiplied, all in all."""
    found, size = dim / SAMPLED, tokens
    while size > block:
        rows = size // _every(size)
        small = min(rows, dim)
        found += 1 + (rows * dim**2 + small**2 * dim + SQUARINGS * small**3) / (size * dim)
        size = -(-size // 2)
    return found


def _every(size: int) -> int:
    """Directions are found from one in so many of a part's tokens, and from no fewer than 64."""
    return min(SAMPLED, max(1, size // 64))


def balanced_order(x: Tensor, metric: Tensor | None, tokens: int, block: int) -> Tensor:
    """The first `tokens` of x [B, H, S, D] in an order whose blocks hold tokens that are alike; the
    others stay. int64 [B, H, S], a bijection.

    Halves are those on either side of the median along the direction of the largest variance, at a
    whole block. `metric` [B, H, D, D], the second moment of the vectors that x is multiplied with,
    makes that the variance of the products; without it distance decides.
    """
    if metric is None:
        metric = torch.eye(x.shape[3], dtype=at_least_fp32(x[:0]).dtype, device=x.device)
        metric = metric.expand(*x.shape[:2], -1, -1)
    order = torch.arange(x.shape[2], device=x.device).expand(x.shape[:3]).contiguous()
    for step in _halvings(tokens, block, x.device):
        parts, size = step.slots.shape
        here = order.index_select(2, step.slots.flatten())
        some = here.unflatten(2, (parts, size))[..., :: _every(size)]
        rows = at_least_fp32(take(x, some.flatten(2))).unflatten(2, some.shape[2:])
        direction = _direction(rows - rows.mean(-2, keepdim=True), metric[:, :, None])
        rows = at_least_fp32(take(x, here)).unflatten(2, (parts, size))
        place = (rows @ direction)[..., 0].nan_to_num(nan=0.0)
        place = place.masked_fill(~step.real, torch.inf).argsort(dim=-1, stable=True)
        here = here.view_as(place).gather(-1, place)
        order[..., :tokens] = here.flatten(2).index_select(2, step.back)
    return order


def second_moment(x: Tensor, groups: int) -> Tensor:
    """Mean of xxᵀ over some tokens of x [B, H, S, D] and a group of heads. [B, groups, D, D]."""
    x = at_least_fp32(x[:, :, ::SAMPLED]).unflatten(1, (groups, -1)).flatten(2, 3)
    return long_product(x.mT, x) / x.shape[2]


def _direction(rows: Tensor, metric: Tensor) -> Tensor:
    """Along which the products of centred rows [..., L, D] vary most, of any length. [..., D, 1].

    A power iteration from the dimensions' own variances. Its matrix is squared instead of applied
    again and again, and is the smaller one of the two that have the same powers.
    """
    start = rows.square().sum(-2)[..., None]
    if rows.shape[-2] < rows.shape[-1]:
        weighed = rows @ metric
        return weighed.mT @ (_power(weighed @ rows.mT) @ (rows @ start))
    return _power(metric @ long_product(rows.mT, rows)) @ start


def _power(x: Tensor) -> Tensor:
    """x to the power of 8, but for its size."""
    for _ in range(SQUARINGS):
        largest = x.abs().amax((-2, -1), keepdim=True)
        x = x / largest.clamp_min(torch.finfo(x.dtype).tiny)
        x = x @ x
    return x


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
