"""Sparse VideoGen: a head looks along space or along time, and a band in that order is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jali.methods.method import Query, kept_dense
from jali.methods.placed import Placed
from jali.planning.band import BandedOrders, banded_orders
from jali.planning.plan import BlockPlan
from jali.planning.ranking import RankedPairs
from jali.planning.sampled_output import squared_errors
from jali.planning.scoring import sample_positions
from jali.tokens.head_order import HeadOrders
from jali.tokens.layout import BlockLayout
from jali.tokens.order import Order, PerHead
from jali.value import check_count, check_share


@dataclass(frozen=True)
class Svg(Placed):
    """Order a head's tokens frame by frame or place by place, as errs less on a few rows; read a
    band around the diagonal of that order, and what stands first in it.

    Args:
        sparsity: share of all pairs that lies in the band, which is *read*: the name is theirs.
        num_sampled_rows: rows that decide about a head.
        first_frame: whether all rows read as much as a frame at the beginning of the order.
        budget: instead of `sparsity`, the share of the block pairs that is read, whole.
        block_size: tokens in a block, of queries and of keys.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> attend(q, k, v, method=Svg(sparsity=0.25), grid=(21, 30, 52))
    """

    sparsity: float = 0.25
    num_sampled_rows: int = 64
    first_frame: bool = True

    name: ClassVar[str] = "svg"
    own_schedule = kept_dense(0.3, (0,))  # of their scripts for Wan
    needs_values: ClassVar[bool] = True
    orders_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("sparsity", self.sparsity)
        check_count("num_sampled_rows", self.num_sampled_rows)

    @property
    def token_order(self) -> Order:
        return PerHead()

    def _orders(self, layout: BlockLayout) -> BandedOrders:
        return banded_orders(layout, self.sparsity, self.first_frame)

    def ranked(self, layout: BlockLayout) -> RankedPairs:
        return self._orders(layout).bands[0]

    def head_orders(self, query: Query) -> HeadOrders:
        layout, orders = query.layout, self._orders(query.layout)
        tokens = layout.q_grid.placed or layout.q.tokens
        (rows,) = sample_positions(tokens, tokens, self.num_sampled_rows, layout.device)
        q, k, v = query.q.index_select(2, rows), query.real_k, query.real_v
        seen = orders.seen(rows, self.budget, layout)
        space, time = squared_errors(q, k, v, query.scale, seen, query.padding)
        of_keys = (time < space).long()
        of_rows = of_keys.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return HeadOrders(orders.q[of_rows], orders.k[of_keys], of_rows)

    def plan(self, query: Query) -> BlockPlan:
        assert query.orders is not None
        levels = self._orders(query.layout).levels(self.budget)
        return BlockPlan(query.layout, (1,), levels[query.orders.choice])

    def planning_share(self, layout: BlockLayout) -> float:
        """Of sampled rows: one product with the keys, three with the values."""
        return 2 * min(1.0, self.num_sampled_rows / layout.q.tokens)
