"""A total out of the budgets that a book holds ready, where it can derive no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jali.planning.curve import Curve, Table, mean

if TYPE_CHECKING:
    from jali.maskbook.book import MaskBook


@dataclass(frozen=True)
class BookCurve(Curve):
    """The curve of the ready budgets that costs most without costing more than the total.

    Every budget of the wanted curve is rounded down to a ready one (up to the least, where it is
    below all), and costs what the book says it does there. Where that leaves out many steps at
    once, as it does with a flat curve, the first of them get the higher budget as far as the total
    goes: budgets never rise along a run that falls.
    """

    book: MaskBook = field(kw_only=True)

    def budgets(
        self, steps: int, layers: int, dense: Callable[[int, int], bool] | None = None
    ) -> Table:
        wanted = self.tables(steps, layers, dense)
        if self.total >= 1:
            return wanted(1.0)

        def table(a: float) -> Table:
            return tuple(tuple(map(self._ready, row)) for row in wanted(a))

        low, high = 0.0, 1.0
        least = self.cost(table(low))
        if least > self.total + 1e-9:
            raise ValueError(
                f"a total of {self.total:g} cannot be made of the budgets that the book holds, "
                f"{', '.join(f'{b:g}' for b in self.book.budgets)}: with what stays dense a run of "
                f"{steps} steps costs {least:.3f} at least; ask for more, or calibrate with a "
                f"lower budget, or with importance, of which any budget is derived"
            )
        for _ in range(60):
            middle = (low + high) / 2
            fits = self.cost(table(middle)) <= self.total + 1e-9
            low, high = (middle, high) if fits else (low, middle)
        return self._filled(table(low), table(high))

    def cost(self, table: Table) -> float:
        """What a run with these budgets costs."""
        costs = {b: self.book.costs(b).mean((2, 3)) for b in self.book.budgets}
        steps, layers = len(table), len(table[0])

        def of(budget: float, step: int, layer: int) -> float:
            if budget >= 1:
                return 1.0
            known = costs[budget]  # of another number of steps or layers: where it would be
            at = step * known.shape[0] // steps, layer * known.shape[1] // layers
            return float(known[at])

        return mean(
            tuple(tuple(of(b, s, n) for n, b in enumerate(row)) for s, row in enumerate(table))
        )

    def _ready(self, budget: float) -> float:
        if budget >= 1:
            return 1.0
        lower = [ready for ready in self.book.budgets if ready <= budget + 1e-9]
        return lower[-1] if lower else self.book.budgets[0]

    def _filled(self, fits: Table, exceeds: Table) -> Table:
        """The first steps of the second table, as many as the total has room for."""
        count = 0
        while count < len(fits) and self.cost(exceeds[: count + 1] + fits[count + 1 :]) <= (
            self.total + 1e-9
        ):
            count += 1
        return exceeds[:count] + fits[count:]
