"""Sparse VideoGen 2: tokens that are alike share a block, and the heaviest blocks are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from jali.methods.method import Query, kept_dense
from jali.methods.threshold import Thresholded
from jali.planning.cluster import OrderTable, clustered, clusters_share
from jali.planning.cost import read_sizes
from jali.planning.mass import log_mass_left, log_rest
from jali.planning.scoring import mean_scores
from jali.planning.selection import ranks
from jali.planning.site import Site
from jali.planning.tables import period_of
from jali.tokens.head_order import HeadOrders
from jali.tokens.layout import BlockLayout
from jali.tokens.order import Order, PerHead, Raster
from jali.value import check_share, check_steps


@dataclass(frozen=True)
class Svg2(Thresholded):
    """Put tokens that are alike into one block, in every head and for queries and keys apart; read
    the heaviest key blocks, by the softmax over block means, up to `top_p_kmeans` of a row's mass.

    Args:
        top_p_kmeans: the mass to keep; the block that reaches it is kept too.
        min_kc_ratio: a row reads at least this share of the key blocks.
        keep: how long clusters serve, as a share of the run (float) or in steps (int).
        budget: a share of dense attention's work, by one mass for all heads, found in every call.
        q_block, k_block: tokens in a block, which is a cluster; tail, probes: as `Sol`
            has them.

    Example:
        >>> attend(q, k, v, method=Svg2(top_p_kmeans=0.9), grid=(21, 30, 52))
    """

    top_p_kmeans: float = 0.9
    min_kc_ratio: float = 0.1
    keep: float | int = 0.25

    name: ClassVar[str] = "svg2"
    keeps_tables: ClassVar[bool] = True
    orders_heads: ClassVar[bool] = True
    own_schedule = kept_dense(0.3, (0,))  # of their scripts for Wan

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("top_p_kmeans", self.top_p_kmeans)
        check_share("min_kc_ratio", self.min_kc_ratio)
        check_steps("keep", self.keep)
        if self.order != Raster():
            raise ValueError(f"svg2 orders tokens by q and k: it has no order {self.order!r}")

    @property
    def token_order(self) -> Order:
        return PerHead()

    def period(self, site: Site) -> int:
        return period_of(site, self.keep)

    def head_orders(self, query: Query) -> HeadOrders:
        """Kept ones, where there are, else by clusters of these numbers."""
        return query.kept(
            OrderTable, self.period(query.site),
            lambda: OrderTable.of(clustered(query.q, query.real_k, query.layout)),
        ).orders  # fmt: skip

    def score(self, query: Query) -> Tensor:
        """The log of a row's mass that is left when a block's turn comes, heaviest first."""
        q, k, layout, _, scale, padding, *_ = query
        sizes = read_sizes(layout, (1,), padding)[0]  # [B|1, N]
        logits = mean_scores(q, k, layout, scale, padding)
        return log_mass_left(logits + sizes.to(logits).log()[:, None, None])

    def above(self, scores: Tensor) -> Tensor:
        least = int(self.min_kc_ratio * scores.shape[-1])
        return (scores >= log_rest(self.top_p_kmeans)) | (ranks(scores) < least)

    def planning_share(self, layout: BlockLayout) -> float:
        """Of making clusters; scoring their means is next to nothing."""
        return clusters_share(layout)
