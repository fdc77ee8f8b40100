"""What methods looked at once, kept between the steps of a run."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from jali.planning.site import Site
from jali.tokens.layout import BlockLayout
from jali.value import check_count

LIMIT = 8 * 2**30  # bytes; 40 heads × 40 layers of 75,600 tokens take 5.6 GB with both branches


class Table(Protocol):
    """What may be kept: `codes` [B, H, ...] of every sample and head, with whatever belongs to
    them, and the levels that they are of, where they are of some."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def levels(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def filled_with(self, other: Self) -> Self:
        """The other's numbers, of the same shape, in this one's memory."""
        ...


T = TypeVar("T", bound=Table)


class KeptTable(NamedTuple):
    """A table, when it was made, and what it is of."""

    period: int
    layout: BlockLayout
    table: Table


def period_of(site: Site, keep: float | int) -> int:
    """Which stretch of the run a step lies in, where each is a share of it (float) or some steps
    (int) long: the steps of one share a table."""
    steps = keep * site.steps if isinstance(keep, float) else keep
    return int(site.step / steps + 1e-9) if steps > 1 else site.step


class Tables:
    """The latest table of every layer, branch and transformer, on the device.

    A table serves the period of the run in which it was made; a call of another period, layout or
    shape makes its own and leaves it here. Where the tables of both guidance branches would take
    more than `limit` bytes, the branches share; where even that is too much, nothing is kept.
    `made` counts the tables that were made, `largest` is the most bytes that they took together.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        check_count("limit", limit, least=0)
        self.limit = limit
        self.made = 0
        self.largest = 0
        self._kept: dict[tuple[str, int, str], KeptTable] = {}

    def find(
        self, site: Site, period: int, layout: BlockLayout, q: Tensor, kind: type[T],
        levels: tuple[int, ...] = (),
    ) -> T | None:  # fmt: skip
        """The table of this kind and of these levels for such queries [B, H, Sq, D], if there is
        one."""
        for branch in (site.branch, "any"):
            found = self._kept.get((site.transformer, site.layer, branch))
            if found is None or found.period != period or found.layout is not layout:
                continue
            table = found.table
            same = table.levels == levels and table.codes.shape[:2] == q.shape[:2]
            if same and isinstance(table, kind):
                return table
        return None

    def keep(self, site: Site, period: int, layout: BlockLayout, table: Table) -> None:
        """Leave a table for the calls to come. Memory of the one before is used again."""
        self.made += 1
        of_a_branch = table.nbytes * site.layers
        if of_a_branch > self.limit:
            return
        branch = site.branch if 2 * of_a_branch <= self.limit else "any"
        key = site.transformer, site.layer, branch
        before = self._kept.get(key)
        if before is not None and type(before.table) is type(table):
            fits = before.table.codes.shape == table.codes.shape
            fits = fits and before.layout is layout  # what belongs to them may be of its keys
            table = before.table.filled_with(table) if fits else table
        self._kept[key] = KeptTable(period, layout, table)
        self.largest = max(self.largest, self.bytes)

    def clear(self) -> None:
        """Give their memory back."""
        self._kept.clear()

    @property
    def bytes(self) -> int:
        """How much they take now."""
        return sum(kept.table.nbytes for kept in self._kept.values())
