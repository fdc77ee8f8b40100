"""Entropy-adaptive attention (ESA): heads that look everywhere get more blocks than others."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from jali.methods.method import Method, Query, check_count
from jali.methods.sampling import jittered_positions
from jali.planning.budget import Budget, blocks_by_entropy
from jali.planning.plan import BlockPlan
from jali.planning.scoring import sample_positions, sampled_scores
from jali.planning.selection import keep_top
from jali.tokens.layout import Blocks
from jali.tokens.order import Order, Raster


@dataclass(frozen=True)
class Entropy(Method):
    """Score each key block by the softmax mass a few sampled queries give it, share the budget
    among heads by the entropy of those scores, keep each head's best blocks.

    `sharpness` 1 shares in proportion to entropy, above that steeper, 0 equally. `seed` draws the
    samples at random per (layer, step) instead of evenly. Text is always read and reads all.
    """

    budget: Budget = field(default_factory=Budget)
    sharpness: float = 1.0
    samples: int = 4
    seed: int | None = None
    q_block: int | None = None
    k_block: int | None = None
    order: Order = field(default_factory=Raster)

    name: ClassVar[str] = "entropy"

    def __post_init__(self) -> None:
        if not 0 <= self.sharpness < math.inf:
            raise ValueError(f"sharpness must be a finite number >= 0, got {self.sharpness}")
        for name in ("samples", "q_block", "k_block"):
            check_count(name, getattr(self, name))

    @property
    def can_be_causal(self) -> bool:  # type: ignore[override]
        return isinstance(self.order, Raster)

    @property
    def ratios(self) -> tuple[int, ...]:
        return (1,)

    @property
    def token_order(self) -> Order:
        return self.order

    def blocks(self, preferred: Blocks) -> Blocks:
        if self.q_block is None and self.k_block is None:
            return preferred
        return Blocks(self.q_block or preferred.q, self.k_block or preferred.k)

    def plan(self, query: Query) -> BlockPlan:
        layout = query.layout
        scores = sampled_scores(
            query.q, query.k, layout, query.scale, self._samples(query), query.padding, query.causal
        )
        keep = blocks_by_entropy(scores, self.budget, self.sharpness, layout.counted_rows)
        rows = layout.text_rows if layout.has_text_rows else None
        return keep_top(scores, keep, layout, layout.forced, rows, query.causal)

    def _samples(self, query: Query) -> Tensor:
        tokens, block, device = query.layout.q.tokens, query.layout.blocks.q, query.q.device
        if self.seed is None:
            return sample_positions(tokens, block, self.samples, device)
        return jittered_positions(tokens, block, self.samples, self.seed, query.site, device)

    @property
    def asked(self) -> float:
        return self.budget.mean

    def with_budget(self, mean: float) -> Entropy:
        floor, ceiling = self.budget.floor, max(self.budget.ceiling, mean)
        floor = None if floor is None else min(floor, mean)
        return replace(self, budget=Budget(mean, floor, ceiling))
