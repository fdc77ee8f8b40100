"""Where work may be moved to and from: some steps or some layers of a run.

At the best allocation a little more work is worth the same everywhere (Lagrange's condition: one
multiplier for all places). A probe spends more in one place and, the total being the same, a little
less in all others; what finished clips gain or lose by it says how far the condition is from being
met there. Work is moved along these gains. A call's time is what it reads and a constant, so work
that is moved at an equal total takes the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jali.evaluation.arena.row import ScheduleSpec
from jali.planning.curve import Curve

MORE = 1.6  # times the budget, where a probe looks
STRENGTHS = (0.6, 1.2, 2.4)  # of the move: the place that gains most gets MORE to the power of that
DIGITS = 4  # of budgets and factors: they are kept as text


class Gain(NamedTuple):
    """What clips gain by more work in a place, in decibels, and the standard error of that."""

    mean: float
    error: float

    @property
    def trusted(self) -> float:
        """The mean, shrunk the more the less certain it is."""
        square = self.mean**2
        return self.mean * square / (square + self.error**2) if square else 0.0


@dataclass(frozen=True, order=True)
class Place:
    """Steps or layers from `first` to before `end`."""

    kind: str
    first: int
    end: int

    def __contains__(self, number: int) -> bool:
        return self.first <= number < self.end

    def __str__(self) -> str:
        if self.end == self.first + 1:
            return f"{self.kind[:-1]} {self.first}"
        return f"{self.kind} {self.first} to {self.end - 1}"


def places(probes: int, steps: int, layers: int) -> list[Place]:
    """So many at most, half of them of steps and half of layers, each about as long as another."""
    of_steps = min(steps, (probes + 1) // 2)
    of_layers = min(layers, probes - of_steps)
    of_steps = min(steps, probes - of_layers)
    return [
        Place(kind, count * number // parts, count * (number + 1) // parts)
        for kind, count, parts in (("steps", steps, of_steps), ("layers", layers, of_layers))
        if parts > 1
        for number in range(parts)
    ]


def moved(
    schedule: ScheduleSpec, total: float, steps: int, layers: int, powers: Mapping[Place, float]
) -> ScheduleSpec:
    """The same spread with MORE to these powers times as much in these places. At the same total
    all other places have a little less."""
    curve = schedule.curve(total)
    along, factors = _profile(curve, steps), list(curve.layers or (1.0,) * layers)
    for place, power in powers.items():
        several = along if place.kind == "steps" else factors
        for number in range(place.first, place.end):
            several[number] *= MORE**power
    across = any(factor != 1 for factor in factors)
    return ScheduleSpec(_rounded(along), schedule.floor, _rounded(factors) if across else ())


def _profile(curve: Curve, steps: int) -> list[float]:
    """Its budgets along the run, as they are without factors of layers."""
    if isinstance(curve.shape, str) or len(curve.shape) != steps:
        bare = Curve(curve.total, curve.shape, curve.floor)
        return [row[0] for row in bare.budgets(steps, 1)]
    return list(curve.shape)


def powers_of(gains: Mapping[Place, Gain], strength: float) -> dict[Place, float]:
    """How far work is moved to and from the places, by what was gained there. Each kind is moved
    around its own mean: more in all steps is no move at all."""
    found: dict[Place, float] = {}
    for kind in dict.fromkeys(place.kind for place in gains):
        own = {place: gain.trusted for place, gain in gains.items() if place.kind == kind}
        found |= {place: gain - sum(own.values()) / len(own) for place, gain in own.items()}
    most = max(map(abs, found.values()), default=0.0)
    return {place: strength * gain / most for place, gain in found.items()} if most else {}


def gain_of(differences: Sequence[float]) -> Gain:
    """Of paired clips."""
    n = len(differences)
    mean = math.fsum(differences) / n
    if n < 2:
        return Gain(mean, math.inf)
    variance = math.fsum((one - mean) ** 2 for one in differences) / (n - 1)
    return Gain(mean, math.sqrt(variance / n))


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{number:.{DIGITS}g}") for number in numbers)
