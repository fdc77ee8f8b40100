"""Sol-Attn: blocks that stand out of their row are read, all others as one mean each."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from jali.methods.method import Query, kept_dense
from jali.methods.threshold import Thresholded
from jali.planning.standard_score import standard_scores
from jali.tokens.layout import BlockLayout
from jali.value import check_amount, check_choice


@dataclass(frozen=True)
class Sol(Thresholded):
    """Read the key blocks whose mean's product with a query block's mean lies `tau` standard
    deviations above its row, and the neighbours of own blocks; read the others as one mean each.

    Args:
        tau: how many standard deviations; above 1 less is read, below more.
        thresh_type: the deviation of a row by the variance of each dimension of the key means alone
            ("diag"), or that of the row itself ("exact").
        budget: instead of `tau`, a share of dense attention's work, tail included: tau is then
            found in every call, one for all heads.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.
        q_block, k_block: tokens in a block.
        order: of the tokens, before they are cut into blocks.

    Example:
        >>> attend(q, k, v, method=Sol(tau=1.3), grid=(21, 30, 52))
    """

    tau: float = 1.0
    thresh_type: str = "diag"
    q_block: int = field(default=64, kw_only=True)
    k_block: int = field(default=64, kw_only=True)
    tail: bool = field(default=True, kw_only=True)

    name: ClassVar[str] = "sol"
    own_schedule = kept_dense(0.2, (0, 1))  # 10 of 50 steps and two layers, as in SGLang

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amount("tau", self.tau)
        check_choice("thresh_type", self.thresh_type, ("diag", "exact"))

    def score(self, query: Query) -> Tensor:
        exact = self.thresh_type == "exact"
        return standard_scores(
            query.q, query.k, query.layout, query.scale, query.padding, exact=exact
        )

    def above(self, scores: Tensor) -> Tensor:
        return scores > self.tau

    def always(self, layout: BlockLayout) -> Tensor:
        return _with_neighbours(layout)


@functools.lru_cache(maxsize=64)
def _with_neighbours(layout: BlockLayout) -> Tensor:
    """What every query block reads, with the blocks before and behind its own. bool [M, N]."""
    always = layout.forced.clone()
    always[:, :-1] |= layout.own[:, 1:]
    always[:, 1:] |= layout.own[:, :-1]
    return always
