"""Entropy-adaptive attention (ESA): heads that look everywhere get more blocks than others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from jali.methods.method import Query, Scored
from jali.methods.sampling import jittered_positions
from jali.planning.budget import blocks_by_entropy
from jali.planning.mass import pooled_masses
from jali.planning.scoring import sample_positions, sampled_scores
from jali.tokens.layout import BlockLayout
from jali.tokens.order import Order, Raster
from jali.value import check_amount, check_count


@dataclass(frozen=True)
class Entropy(Scored):
    """Score each key block by the softmax mass a few sampled queries give it, share the budget
    among heads by the entropy of those scores, keep each head's best blocks.

    Text is always read and reads all.

    Args:
        budget: mean share of the key blocks, and the range of a single head.
        sharpness: 1 shares in proportion to entropy, above that steeper, 0 equally.
        samples: queries that are looked at in every query block, on all keys.
        means: instead of those, all queries on so many means of every key block; 1 is PARK's score.
        seed: draw the samples at random per (layer, step) instead of evenly.
        q_block, k_block: tokens in a block; None is what the backend likes best.
        order: of the tokens, before they are cut into blocks.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> attend(q, k, v, method=Entropy(Budget(0.3), sharpness=2.0), grid=(21, 30, 52))
    """

    sharpness: float = 1.0
    samples: int = 4
    seed: int | None = None
    means: int | None = field(default=None, kw_only=True)
    order: Order = field(default_factory=Raster, kw_only=True)

    name: ClassVar[str] = "entropy"
    uneven_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("sharpness", self.sharpness)
        check_count("samples", self.samples)
        if self.means is not None:
            check_count("means", self.means)

    @property
    def can_be_causal(self) -> bool:  # type: ignore[override]
        return super().can_be_causal and self.means is None  # a mean holds keys to come

    @property
    def token_order(self) -> Order:
        return self.order

    def score(self, query: Query) -> Tensor:
        q, k, layout, site, scale, padding, causal, *_ = query
        if self.means is not None:
            if layout.blocks.k % self.means:
                raise ValueError(
                    f"{self.means} means do not divide a block of {layout.blocks.k} keys"
                )
            return pooled_masses(q, k, layout, scale, padding, self.means)
        tokens, block = layout.q.tokens, layout.blocks.q
        if self.seed is None:
            at = sample_positions(tokens, block, self.samples, q.device)
        else:
            at = jittered_positions(tokens, block, self.samples, self.seed, site, q.device)
        return sampled_scores(q, k, layout, scale, at, padding, causal)

    def planning_share(self, layout: BlockLayout) -> float:
        """Of products between sampled queries and all keys, or all queries and means of keys."""
        if self.means is not None:
            return 0.5 * min(1.0, self.means / layout.blocks.k)
        return 0.5 * min(1.0, self.samples / layout.blocks.q)

    def keep(self, scores: Tensor, layout: BlockLayout) -> Tensor:
        return blocks_by_entropy(scores, self.budget, self.sharpness, layout.counted_rows)
