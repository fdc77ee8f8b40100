"""Full attention, as a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jali.methods.method import Method, Query
from jali.planning.plan import BlockPlan, full_plan
from jali.planning.site import Site


@dataclass(frozen=True)
class Dense(Method):
    """The stock operation, bit for bit.

    Example:
        >>> attend(q, k, v, method="dense").out  # what PyTorch's attention gives
    """

    name: ClassVar[str] = "dense"
    can_be_causal: ClassVar[bool] = True

    def active(self, site: Site, tokens: int) -> bool:  # noqa: ARG002
        return False

    def plan(self, query: Query) -> BlockPlan:
        return full_plan(query.layout, query.causal)

    @property
    def mean_budget(self) -> float:
        return 1.0

    def with_budget(self, mean: float) -> Dense:
        if mean != 1:
            raise ValueError(f"dense attention has no budget but 1, got {mean}")
        return self


@dataclass(frozen=True)
class FastestDense(Dense):
    """Full attention by the fastest kernel at hand: what the dense calls of a sparse run take, and
    runs that are only watched."""

    name: ClassVar[str] = "fastest_dense"
