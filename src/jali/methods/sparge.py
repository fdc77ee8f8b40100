"""SpargeAttn: means speak for blocks whose tokens are alike; the rest is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from jali.methods.method import Query, kept_dense
from jali.methods.threshold import Thresholded
from jali.planning.likeness import pair_likeness
from jali.planning.mass import log_rest, ranked_by_mass
from jali.planning.scoring import mean_scores
from jali.planning.selection import ranks
from jali.value import check_share


@dataclass(frozen=True)
class Sparge(Thresholded):
    """Keep the heaviest key blocks by the softmax over block means, up to `cdfthreshd` of a row's
    mass; blocks whose tokens are not alike are read, and read everything.

    Args:
        simthreshd1: the mean cosine of a block's pairs above which its tokens are alike. None is
            0.6, and -0.1 where a share is asked for, by `topk` or `budget`: SpargeAttn's defaults.
        cdfthreshd: the mass to keep.
        topk: instead of that, a share of the key blocks, the same in every row.
        budget: a share of dense attention's work, by one mass for all heads, found in every call.
        q_block, k_block, order, tail, probes: as `Sol` has them.

    Example:
        >>> attend(q, k, v, method=Sparge(topk=0.5), grid=(21, 30, 52))
    """

    simthreshd1: float | None = None
    cdfthreshd: float = 0.98
    topk: float | None = None

    name: ClassVar[str] = "sparge"
    own_schedule = kept_dense()  # nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.alike, int | float) or not -1 <= self.alike <= 1:
            raise ValueError(f"simthreshd1 is a cosine in [-1, 1], got {self.simthreshd1!r}")
        check_share("cdfthreshd", self.cdfthreshd)
        check_share("topk", self.topk or 0.0)
        if self.topk is not None and self.budget is not None:
            raise ValueError("topk and budget ask for the same in two ways: give one of them")

    @property
    def alike(self) -> float:
        """The cosine above which a block's mean speaks for it."""
        own = 0.6 if self.mean_budget is None else -0.1
        return own if self.simthreshd1 is None else self.simthreshd1

    def score(self, query: Query) -> Tensor:
        """Log of the mass left after a block, or minus its rank; from 2 on what is not alike."""
        q, k, layout, _, scale, padding, *_ = query
        z = mean_scores(q, k, layout, scale, padding)
        if self.alike < 0:  # all are: a mean over all pairs is a squared length
            return self._ranked(z)
        rows, keys = pair_likeness(q, k, layout, padding)
        scores = self._ranked(z.masked_fill(keys <= self.alike, -torch.inf))
        first = 4 / (rows + keys).clamp_min(1e-30)
        return torch.where(torch.minimum(rows, keys) <= self.alike, first, scores)

    def _ranked(self, z: Tensor) -> Tensor:
        return ranked_by_mass(z, after=True) if self.topk is None else -ranks(z).to(z.dtype)

    def above(self, scores: Tensor) -> Tensor:
        if self.topk is None:
            return scores >= log_rest(self.cdfthreshd)
        return scores > -max(1, int(self.topk * scores.shape[-1] + 1e-9))

    @property
    def mean_budget(self) -> float | None:
        return self.budget if self.topk is None else self.topk

    def with_budget(self, mean: float) -> Self:
        return super().with_budget(mean) if self.topk is None else replace(self, topk=mean)
