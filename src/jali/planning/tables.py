"""Error tables that are kept between the steps of a run."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from jali.planning.distortion import ErrorTable
from jali.planning.site import Site
from jali.tokens.layout import BlockLayout

LIMIT = 8 * 2**30  # bytes; 40 heads × 40 layers of 75,600 tokens take 5.6 GB with both branches


class KeptTable(NamedTuple):
    """A table, when it was made, and what it is of."""

    period: int
    layout: BlockLayout
    table: ErrorTable


class Tables:
    """The latest error table of every layer, branch and transformer, on the device.

    A table serves the period of the run in which it was made; a call of another period, layout or
    shape makes its own and leaves it here. Where the tables of both guidance branches would take
    more than `limit` bytes, the branches share; where even that is too much, nothing is kept.
    `made` counts the tables that were made, `largest` is the most bytes that they took together.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.made = 0
        self.largest = 0
        self._kept: dict[tuple[str, int, str], KeptTable] = {}

    def find(
        self, site: Site, period: int, layout: BlockLayout, q: Tensor, levels: tuple[int, ...]
    ) -> ErrorTable | None:
        """The table of these levels for such queries [B, H, Sq, D], if there is one."""
        for branch in (site.branch, "any"):
            found = self._kept.get((site.transformer, site.layer, branch))
            if found is None or found.period != period or found.layout is not layout:
                continue
            if found.table.codes.shape[:2] == q.shape[:2] and found.table.levels == levels:
                return found.table
        return None

    def keep(self, site: Site, period: int, layout: BlockLayout, table: ErrorTable) -> None:
        """Leave a table for the calls to come. Memory of the one before is used again."""
        self.made += 1
        of_a_branch = table.codes.numel() * site.layers
        if of_a_branch > self.limit:
            return
        branch = site.branch if 2 * of_a_branch <= self.limit else "any"
        key = site.transformer, site.layer, branch
        before = self._kept.get(key)
        if before is not None and before.table.codes.shape == table.codes.shape:
            before.table.codes.copy_(table.codes)
            before.table.top.copy_(table.top)
            table = before.table._replace(levels=table.levels)
        self._kept[key] = KeptTable(period, layout, table)
        self.largest = max(self.largest, self.bytes)

    def clear(self) -> None:
        """Give their memory back."""
        self._kept.clear()

    @property
    def bytes(self) -> int:
        """How much they take now."""
        return sum(kept.table.codes.numel() for kept in self._kept.values())
