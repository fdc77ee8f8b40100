"""Mass targets (LoSA): the exact masses of one step say what is read for the rest of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jali.methods.method import Query, kept_dense
from jali.methods.threshold import Thresholded
from jali.planning.mass import MassTable, exact_masses, log_rest, ranked_by_mass
from jali.planning.site import Site
from jali.planning.tables import period_of
from jali.planning.tradeoff import spread
from jali.tokens.layout import BlockLayout
from jali.value import check_share, check_steps

HALVES_PER_OCTAVE = 1024  # how many fp16 numbers lie between a number and its double


@dataclass(frozen=True)
class Mass(Thresholded):
    """Sum the exact attention of every block in one dense pass, and read the heaviest blocks that
    hold `theta` of a row's mass, in that step and in those after it.

    In a run the first sparse step of every layer and guidance branch looks, and the others read
    what it found; a call without `tables` looks itself.

    Args:
        theta: share of the mass that is kept.
        keep: how long a look serves, as a share of the run (float) or in steps (int).
        budget: instead of `theta`, a share of dense attention's work: its theta is found in every
            call from what is kept, one for all heads.
        q_block, k_block, order, tail, probes: as `Sol` has them.

    Example:
        >>> Schedule(Mass(theta=0.99), dense_steps=3)
    """

    theta: float = 0.99
    keep: float | int = 1.0

    name: ClassVar[str] = "mass"
    keeps_tables: ClassVar[bool] = True
    own_schedule = kept_dense(3)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("theta", self.theta)
        check_steps("keep", self.keep)

    def score(self, query: Query) -> Tensor:
        codes, layout = self.table(query).codes.float(), query.layout
        if self.budget is None:
            return codes
        return codes * spread(layout.M, layout.N, HALVES_PER_OCTAVE, layout.device)

    def table(self, query: Query) -> MassTable:
        """What is behind the plan: kept, where it is, else from these numbers."""
        return query.kept(MassTable, self.period(query.site), lambda: _look(query))

    def period(self, site: Site) -> int:
        return period_of(site, self.keep)

    def above(self, scores: Tensor) -> Tensor:
        return scores > log_rest(self.theta)

    def planning_share(self, layout: BlockLayout) -> float:  # noqa: ARG002
        """Of all products of queries and keys, once."""
        return 0.5


def _look(query: Query) -> MassTable:
    q, k, layout, _, scale, padding, *_ = query
    masses = exact_masses(q, k, layout, scale, padding)
    return MassTable(ranked_by_mass(masses.log()).to(torch.float16))
