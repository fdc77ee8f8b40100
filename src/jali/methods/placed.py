"""Methods that read blocks by where they lie, without looking at q and k."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from jali.methods.method import Method, Query, check_probes
from jali.planning.plan import BlockPlan
from jali.planning.ranking import RankedPairs
from jali.tokens.layout import BlockLayout, Blocks
from jali.value import check_count, check_share


@dataclass(frozen=True)
class Placed(Method):
    """A method with a fixed pattern, and an order in which that grows or shrinks with a budget.

    A subclass has a `name`, options as fields, and `ranked(layout)`, which is made once for a
    layout and remembered.
    """

    budget: float | None = field(default=None, kw_only=True)
    block_size: int = field(default=128, kw_only=True)
    tail: bool = field(default=False, kw_only=True)
    probes: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_probes(self.probes)
        if self.budget is not None:
            check_share("budget", self.budget)
        check_count("block_size", self.block_size)

    @abc.abstractmethod
    def ranked(self, layout: BlockLayout) -> RankedPairs:
        """In which order block pairs are read."""

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        return Blocks(self.block_size, self.block_size)

    def plan(self, query: Query) -> BlockPlan:
        return self.ranked(query.layout).plan(self.budget)

    @property
    def mean_budget(self) -> float | None:
        return self.budget

    def with_budget(self, mean: float) -> Self:
        return replace(self, budget=mean)


def three_sizes(name: str, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Three counts along t, h and w."""
    if not isinstance(sizes, tuple | list) or len(sizes) != 3:
        raise ValueError(f"{name} is (t, h, w), one for all heads, got {sizes!r}")
    for size in sizes:
        check_count(f"every one of {name}", size)
    return sizes[0], sizes[1], sizes[2]
