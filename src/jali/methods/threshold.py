"""Methods that read whatever lies above a threshold, instead of a number of blocks."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from jali.methods.method import Method, Query, check_probes
from jali.planning.plan import BlockPlan
from jali.planning.threshold import plan_of, within_share
from jali.tokens.layout import BlockLayout, Blocks
from jali.tokens.order import Order, Raster
from jali.value import check_share


@dataclass(frozen=True)
class Thresholded(Method):
    """A method that scores key blocks and reads those above a threshold: its own, or with a budget
    the one at which a call costs that share.

    All heads and rows of a sample have the same threshold, so they differ in how much they read. A
    subclass has a `name`, options as fields, `score(query)` and `above(scores)`.
    """

    budget: float | None = field(default=None, kw_only=True)
    q_block: int = field(default=128, kw_only=True)
    k_block: int = field(default=64, kw_only=True)
    order: Order = field(default_factory=Raster, kw_only=True)
    tail: bool = field(default=False, kw_only=True)
    probes: int = field(default=0, kw_only=True)

    uneven_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_probes(self.probes)
        if self.budget is not None:
            check_share("budget", self.budget)
        Blocks(self.q_block, self.k_block)

    @property
    def token_order(self) -> Order:
        return self.order

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        return Blocks(self.q_block, self.k_block)

    @abc.abstractmethod
    def score(self, query: Query) -> Tensor:
        """What the threshold is on: fp32 [B, H, M, N], higher is read sooner."""

    @abc.abstractmethod
    def above(self, scores: Tensor) -> Tensor:
        """What the method's own threshold keeps. bool [B, H, M, N]."""

    def always(self, layout: BlockLayout) -> Tensor:
        """What every query block reads. bool [M, N]."""
        return layout.forced

    def planning_share(self, layout: BlockLayout) -> float:
        """Of products between block means, which is what most of them score by."""
        return 0.5 / (layout.blocks.q * layout.blocks.k)

    def plan(self, query: Query) -> BlockPlan:
        layout, scores = query.layout, self.score(query)
        always = self.always(layout)
        if self.budget is None:
            kept = self.above(scores)
        else:
            kept = within_share(
                scores, layout, self.budget, always, query.padding, self.tail, self.sum_over_ranks
            )
        return plan_of(kept, scores, always, layout)

    def sum_over_ranks(self, work: Tensor) -> Tensor:
        """Work of all heads of a layer, where ranks share them."""
        return work

    @property
    def mean_budget(self) -> float | None:
        return self.budget

    def with_budget(self, mean: float) -> Self:
        return replace(self, budget=mean)
