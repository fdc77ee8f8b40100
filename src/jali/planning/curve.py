"""Budgets along a run: how a total is spread over steps and layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jali.value import check_choice, check_share

SHAPES = ("exponential", "linear", "flat")
FLOOR = 0.03
LINEAR_FROM = 0.55
FIRST = 1 / 16  # of the numbers that stand for a curve: those that give the first step less than 1

Table = tuple[tuple[float, ...], ...]  # a number for every step and layer


@dataclass(frozen=True)
class Curve:
    """A budget for every step and layer, so that the whole run costs `total`.

    The total is a share of *all* self-attention work of the run, dense steps and layers included.
    What the curve puts at 1 is dense.

    Args:
        total: the mean over all calls, above 0 and at most 1.
        shape: "exponential" and "linear" fall from 1 in the first step, or from less where the
            total does not pay for that; "flat" is the same budget everywhere; a tuple holds
            relative budgets along the run, for any number of steps.
        floor: no call is asked for less.
        layers: a factor on the budgets of each layer, as many as the model has; none is 1 for all.

    Example:
        >>> [round(row[0], 2) for row in Curve(0.4).budgets(steps=5, layers=1)]
        [1.0, 0.52, 0.27, 0.14, 0.07]
    """

    total: float
    shape: str | tuple[float, ...] = "exponential"
    floor: float = FLOOR
    layers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_share("total", self.total)
        check_share("floor", self.floor)
        if self.total == 0:
            raise ValueError("total must be a share above 0, got 0")
        check_shape("shape", self.shape)
        check_factors("layers", self.layers)
        if not isinstance(self.shape, str):
            object.__setattr__(self, "shape", tuple(map(float, self.shape)))
        object.__setattr__(self, "layers", tuple(map(float, self.layers)))

    @property
    def words(self) -> str:
        """The shape in a word, or as numbers with commas."""
        return self.shape if isinstance(self.shape, str) else ",".join(f"{x:g}" for x in self.shape)

    def budgets(
        self, steps: int, layers: int, dense: Callable[[int, int], bool] | None = None
    ) -> Table:
        """The budget of every step and layer; 1 where a call is dense, as `dense(step, layer)` is.

        Raises ValueError where no such run costs the total.
        """
        table = self.tables(steps, layers, dense)
        return table(self._solve(lambda a: mean(table(a)), steps))

    def tables(
        self, steps: int, layers: int, dense: Callable[[int, int], bool] | None = None
    ) -> Callable[[float], Table]:
        """All that it can be: budgets of every step and layer by a number from 0 (the least of
        them) to 1 (all dense)."""
        if self.layers and len(self.layers) != layers:
            raise ValueError(f"the curve has {len(self.layers)} layers, the model {layers}")
        fixed = [[bool(dense and dense(s, n)) for n in range(layers)] for s in range(steps)]
        factors = self.layers or (1.0,) * layers

        def table(a: float) -> Table:
            return tuple(
                tuple(1.0 if held else min(1.0, max(self.floor, height * f))
                      for f, held in zip(factors, row, strict=True))
                for height, row in zip(self._heights(a, steps), fixed, strict=True)
            )  # fmt: skip

        return table

    def _solve(self, cost: Callable[[float], float], steps: int) -> float:
        """Where the cost, which rises with `a`, is the total."""
        low, high = 0.0, 1.0
        for end, bound in (("more", low), ("less", high)):
            found = cost(bound)
            if abs(found - self.total) < 1e-9:
                return bound
            if (found > self.total) == (end == "more"):
                raise ValueError(
                    f"a total of {self.total:g} cannot be reached in {steps} steps: what stays "
                    f"dense and the floor of {self.floor:g} cost {found:.3f}; ask for {end}"
                )
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle) < self.total else (low, middle)
        return (low + high) / 2

    def _heights(self, a: float, steps: int) -> list[float]:
        """Budgets along the run before factors and bounds; `a` from 0 (least) to 1 (most)."""
        along = [step / max(1, steps - 1) for step in range(steps)]
        if self.shape == "flat":
            return [a] * steps
        if isinstance(self.shape, str):
            # Only the first step is above the floor, up to FIRST; then its fall becomes less steep,
            # from endless to none (a = 1: all steps are dense).
            first, a = min(1.0, a / FIRST), max(0.0, (a - FIRST) / (1 - FIRST))
            steep = math.inf if a == 0 else 1 / a - 1
            if self.shape == "exponential":
                return [first if x == 0 else math.exp(-steep * x) for x in along]
            return [first if x == 0 else 1 - steep * x for x in along]
        if a == 1:
            return [math.inf] * steps
        return [_between(self.shape, x) * a / (1 - a) for x in along]


def usual_shape(total: float, linear_from: float = LINEAR_FROM) -> str:
    """How a total is spread where nobody says it: what gave the better clips of nano."""
    return "linear" if total >= linear_from else "exponential"


def check_shape(name: str, value: Any) -> None:
    """The name of a curve, or relative budgets along the run."""
    if isinstance(value, str):
        check_choice(name, value, SHAPES)
    elif not isinstance(value, Sequence) or not value:
        raise ValueError(f"{name} must be {', '.join(SHAPES)} or a tuple of numbers, got {value!r}")
    else:
        check_factors(name, value)


def check_factors(name: str, values: Any) -> None:
    """Numbers above 0."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name} must be a tuple of numbers above 0, got {values!r}")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < math.inf):
            raise ValueError(f"every one of {name} must be a number above 0, got {value!r}")


def _between(values: tuple[float, ...], at: float) -> float:
    """The polygon through evenly spaced values, at a place in 0..1."""
    place = at * (len(values) - 1)
    left = min(int(place), max(0, len(values) - 2))
    right = min(left + 1, len(values) - 1)
    return values[left] + (place - left) * (values[right] - values[left])


def mean(table: Table) -> float:
    """Over steps and layers."""
    return sum(map(sum, table)) / (len(table) * len(table[0]))
