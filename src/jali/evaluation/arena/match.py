"""Equal work: what is asked for is corrected until what was achieved is the total."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from jali.error import InputError

CLOSE = 0.005  # of a total: what is nearer counts as reached
TRIES = 3


class UnreachableError(InputError):
    """A total that no run of such a schedule costs."""


class HasCost(Protocol):
    """A run, and the share of all attention work that it did."""

    @property
    def cost(self) -> float: ...


T = TypeVar("T", bound=HasCost)


def matched(
    total: float, make: Callable[[float], T], first: float | None = None
) -> tuple[T, list[tuple[float, float]]]:
    """The run whose achieved total is nearest to the wanted one, and (asked, achieved) of all
    tries, the nearest first.

    `make` runs with what is asked for, at first the total itself or `first`. An `UnreachableError`
    of it is raised on, unless what could not be had was a correction.
    """
    tries: list[tuple[float, T]] = []
    ask = total if first is None else first
    while len(tries) < TRIES:
        try:
            made = make(ask)
        except UnreachableError:
            if not tries:
                raise
            break
        tries.append((ask, made))
        if abs(made.cost - total) <= CLOSE:
            break
        ask = corrected([(asked, made.cost) for asked, made in tries], total)
        if any(abs(ask - asked) < 1e-4 for asked, _ in tries):
            break
    tries.sort(key=lambda one: abs(one[1].cost - total))
    return tries[0][1], [(asked, made.cost) for asked, made in tries]


def corrected(tries: Sequence[tuple[float, float]], total: float) -> float:
    """What to ask for next, from (asked, achieved): the secant through the last two."""
    asked, got = tries[-1]
    slope = 1.0
    if len(tries) > 1:
        before, got_before = tries[-2]
        if abs(got - got_before) < 1e-6:  # it cannot be had nearer
            return before
        # Costs come in whole blocks: a secant may be steep by chance.
        slope = min(4.0, max(0.25, (asked - before) / (got - got_before)))
    return min(1.0, max(0.005, asked + slope * (total - got)))
