"""DraftAttention: a small draft of the attention map says which tiles of it are worked out."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from jali.methods.method import Method, Query, check_probes, kept_dense
from jali.planning.plan import BlockPlan
from jali.planning.scoring import mean_scores
from jali.planning.threshold import plan_of, within_share
from jali.tokens.layout import BlockLayout, Blocks
from jali.tokens.order import Order, Tiled
from jali.value import check_count, check_share


@dataclass(frozen=True)
class Draft(Method):
    """Pool tiles of every frame, take the softmax of the small map of their products, and read the
    1 − sparsity_ratio largest entries of each head's map, wherever in it they lie.

    Args:
        sparsity_ratio: share of a head's map that is skipped.
        pool_h, pool_w: tokens of a frame that are pooled, down and across; together a block.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> attend(q, k, v, method=Draft(sparsity_ratio=0.75), grid=(21, 30, 52))
    """

    sparsity_ratio: float = 0.9
    pool_h: int = 8
    pool_w: int = 16
    tail: bool = field(default=False, kw_only=True)
    probes: int = field(default=0, kw_only=True)

    name: ClassVar[str] = "draft"
    own_schedule = kept_dense(0.3, (0,))  # timesteps above 925 of Wan: 15 of 50 steps

    def __post_init__(self) -> None:
        check_probes(self.probes)
        check_share("sparsity_ratio", self.sparsity_ratio)
        check_count("pool_h", self.pool_h)
        check_count("pool_w", self.pool_w)

    @functools.cached_property
    def token_order(self) -> Order:
        return Tiled((1, self.pool_h, self.pool_w))

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        return Blocks(self.pool_h * self.pool_w, self.pool_h * self.pool_w)

    def plan(self, query: Query) -> BlockPlan:
        q, k, layout, _, scale, padding, *_ = query
        z = mean_scores(q, k, layout, scale, padding)
        if layout.has_text_keys:  # text is read by everybody and has no place in the draft
            z = z.masked_fill(layout.text_keys, -torch.inf)
        scores = z.log_softmax(-1)
        share, always = 1 - self.sparsity_ratio, layout.forced
        kept = within_share(scores, layout, share, always, padding, self.tail, per_head=True)
        return plan_of(kept, scores, always, layout)

    def planning_share(self, layout: BlockLayout) -> float:
        """Of products between block means."""
        return 0.5 / (layout.blocks.q * layout.blocks.k)

    @property
    def mean_budget(self) -> float:
        return 1 - self.sparsity_ratio

    def with_budget(self, mean: float) -> Draft:
        return replace(self, sparsity_ratio=1 - mean)
