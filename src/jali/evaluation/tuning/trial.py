"""Points that are tried: a method on a schedule at a total, made as clips and measured once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from torch import Tensor

from jali.evaluation.arena.leaderboard import speed_ups
from jali.evaluation.arena.record import Record, Results
from jali.evaluation.arena.row import MethodSpec, Row, ScheduleSpec
from jali.evaluation.arena.run import Game
from jali.evaluation.arena.score import Scorer

LATEST = 3  # groups by which the next one is expected


class TimeOver(Exception):  # noqa: N818
    """What comes next would end after the minutes that were given."""


@dataclass
class Trials:
    """Tries, one after the other. What is known already, also from a tuning that was cut, is not
    made again. `reserve` seconds are left for what has to come in the end."""

    game: Game
    scorer: Scorer
    reserve: Callable[[], float] = lambda: 0.0
    dense_pace: float = 0.0
    _paces: list[float] = field(default_factory=list)  # seconds of a group, the judging included
    _dense: tuple[int, Tensor] | None = field(default=None, repr=False)
    _timed: set[int] = field(default_factory=set)

    @property
    def results(self) -> Results:
        return self.game.results

    @property
    def seconds_left(self) -> float:
        return float("inf") if self.game.stop is None else self.game.stop - time.monotonic()

    def try_row(self, row: Row, firsts: Sequence[int], keep: bool = True) -> list[Record]:
        """The records of a row on these groups of prompts; `TimeOver` where there is no time.
        Clips that nobody will look at need not be kept."""
        for first in firsts:
            if first not in self.results.of(row):
                self._make(row, self.results.group(first), keep)
        known = self.results.of(row)
        return [known[first] for first in firsts]

    def time_dense(self, first: int) -> Tensor:
        """The dense clips of a group, made or, where they are there, read; timed once a session."""
        group = self.results.group(first)
        if self._dense is None or self._dense[0] != first:
            if first in self._timed:
                kept = self.game.studio.read_dense(group)
                assert kept is not None
                self._dense = first, kept
            else:
                self._check_time(self.dense_pace)
                begun = time.monotonic()
                self._dense = first, self.game.dense(group)
                self._timed.add(first)
                self.dense_pace = time.monotonic() - begun
                self.game.done += 1
        return self._dense[1]

    def _make(self, row: Row, group: range, keep: bool) -> None:
        dense = self.time_dense(group.start)
        self._check_time(self.pace)
        words = "prompt" if len(group) == 1 else "prompts"
        self.game.tell(f"{row}, {words} {group.start + 1}", self.game.done, self.game.all)
        begun = time.monotonic()
        made = self.game.studio.make(self.game.plan.settings(row, row.total, self.game.pipe), group)
        asked = float(row.total or 0)
        self.game.note(row, group, made, [(asked, made.cost)], dense, self.scorer, keep)
        self._paces.append(time.monotonic() - begun)
        self.game.done += 1

    @property
    def pace(self) -> float:
        """Seconds of a group of clips, by the latest: a machine may be slower for a while."""
        return fmean(self._paces[-LATEST:]) if self._paces else self.dense_pace

    def _check_time(self, needs: float) -> None:
        if needs + self.reserve() > self.seconds_left:
            raise TimeOver

    def value(self, records: Sequence[Record], metric: str) -> float:
        """The mean over clips; of a speed, over groups of them."""
        return fmean(self.values(records, metric))

    def values(self, records: Sequence[Record], metric: str) -> list[float]:
        if metric == "speedup":
            return [fmean(several) for several in speed_ups(self.results, records)]
        return [value for record in records for value in record.metrics[metric]]

    def points(
        self, method: MethodSpec, schedule: ScheduleSpec, firsts: Sequence[int], metric: str
    ) -> dict[float, float]:
        """The totals at which a method has clips of all these groups, with what they show."""
        found = {}
        for row in self.results.rows():
            known = self.results.of(row)
            if (row.method, row.schedule) == (method, schedule) and set(firsts) <= set(known):
                assert row.total is not None
                found[row.total] = self.value([known[first] for first in firsts], metric)
        return found
