"""Full attention, as a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jali.methods.method import Method, Query
from jali.planning.plan import BlockPlan, full_plan
from jali.planning.site import Site
from jali.tokens.layout import Blocks
from jali.tokens.order import Order, Raster


@dataclass(frozen=True)
class Dense(Method):
    """The stock operation, bit for bit."""

    name: ClassVar[str] = "dense"
    can_be_causal: ClassVar[bool] = True

    def active(self, site: Site, tokens: int) -> bool:  # noqa: ARG002
        return False

    @property
    def ratios(self) -> tuple[int, ...]:
        return (1,)

    @property
    def token_order(self) -> Order:
        return Raster()

    def blocks(self, preferred: Blocks) -> Blocks:
        return preferred

    def plan(self, query: Query) -> BlockPlan:
        return full_plan(query.layout, query.causal)

    @property
    def asked(self) -> float:
        return 1.0

    def with_budget(self, mean: float) -> Dense:
        if mean != 1:
            raise ValueError(f"dense attention has no budget but 1, got {mean}")
        return self
