"""The same total spread in other ways: a linear curve, and work moved to where clips gain by it.

Every way is judged by paired clips at the total that was found, and taken only if they are better
beyond their interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jali.evaluation.arena.row import Row, ScheduleSpec
from jali.evaluation.quality.interval import FEWEST, Interval, interval
from jali.evaluation.tuning.outcome import Found, found_of
from jali.evaluation.tuning.place import STRENGTHS, Gain, Place, gain_of, moved, places, powers_of
from jali.evaluation.tuning.search import PER_DB, height
from jali.evaluation.tuning.trial import TimeOver, Trials

LINEAR = ScheduleSpec("linear")
FEWEST_PROBES = 4  # two halves of the run, two of the layers


@dataclass
class Refinement:
    """Tries around a point that was found, and what they showed."""

    trials: Trials
    metric: str
    deciding: Sequence[int]
    probes: int
    gains: dict[Place, Gain] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self, chosen: Found) -> Found:
        """The best spread of the point's total; itself, where none is better for certain."""
        results = self.trials.results
        if sum(len(results.group(first)) for first in self.deciding) < FEWEST:
            return chosen
        try:
            found = self._better(chosen, [replace(chosen.row, schedule=LINEAR)], "A linear curve")
            if self.probes:
                found = self._move(found)
        except TimeOver:
            self.notes.append("The minutes left no time for all other spreads of the total.")
            found = chosen
        return found

    def _better(self, now: Found, rows: Sequence[Row], words: str) -> Found:
        """The best of these, if it is better than what there is."""
        best: tuple[Found, Interval] | None = None
        for row in rows:
            self.trials.try_row(row, self.deciding)
            found = found_of(self.trials, row, self.deciding)
            gain = interval(self.differences(found, now))
            assert gain.mean is not None
            if best is None or best[1].mean is None or gain.mean > best[1].mean:
                best = found, gain
        assert best is not None
        found, gain = best
        assert gain.mean is not None
        assert gain.low is not None
        said = f"{words}: {gain.mean:+.2f} ± {gain.mean - gain.low:.2f} dB".replace("-", "−")
        said += "" if self.metric == "psnr" else f" of {self.metric.upper()}"
        taken = gain.low > 0
        self.notes.append(f"{said} at the same total{'' if taken else ', so it was not taken'}.")
        return found if taken else now

    def _move(self, now: Found) -> Found:
        """Measure what clips gain by more work in every place, and move it there."""
        steps = int(self.trials.game.plan.dense.steps or 1)
        layers = layers_of(self.trials.game.pipe)
        several = places(self._affordable(), steps, layers)
        if not several:
            self.notes.append("The minutes left no time to probe steps and layers.")
            return now
        total = float(now.row.total or 0)
        assert now.row.schedule is not None
        self.trials.game.all += len(self.deciding) * (len(several) + len(STRENGTHS))
        for place in several:
            spread = moved(now.row.schedule, total, steps, layers, {place: 1.0})
            row = replace(now.row, schedule=spread)
            self.trials.try_row(row, self.deciding, keep=False)
            found = found_of(self.trials, row, self.deciding)
            self.gains[place] = gain_of(self.differences(found, now))
        rows = [
            replace(now.row, schedule=moved(now.row.schedule, total, steps, layers, powers))
            for strength in STRENGTHS
            if (powers := powers_of(self.gains, strength))
        ]
        words = f"Work moved between steps and layers, by {len(several)} probes"
        return self._better(now, rows, words) if rows else now

    def _affordable(self) -> int:
        """Probes that the minutes leave time for: coarser places where they are few."""
        pace = len(self.deciding) * self.trials.pace
        left = self.trials.seconds_left - self.trials.reserve()
        fits = self.probes if left == float("inf") else int(left / pace) - len(STRENGTHS)
        if fits < FEWEST_PROBES:
            return 0
        if fits < self.probes:
            self.notes.append(f"The minutes were enough for {fits} of {self.probes} probes.")
        return min(fits, self.probes)

    def differences(self, one: Found, other: Found) -> list[float]:
        """How much better one is, clip by clip, in decibels; as it would be at equal work, since
        what is achieved comes in whole blocks."""
        own, others = (self.trials.values(found.records, self.metric) for found in (one, other))
        more = (_achieved(one) - _achieved(other)) / PER_DB
        return [
            height(self.metric, a) - height(self.metric, b) - more
            for a, b in zip(own, others, strict=True)
        ]


def _achieved(found: Found) -> float:
    return sum(record.achieved for record in found.records) / len(found.records)


def layers_of(pipe: Any) -> int:
    """Of the transformer with the fewest: a curve serves all of them."""
    from jali.integration.attachment import self_attentions
    from jali.integration.modes import transformers_of

    return min(len(self_attentions(module)) for _, module in transformers_of(pipe)[1])
