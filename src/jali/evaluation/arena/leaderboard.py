"""Who is ahead, by how much, and whether that can be told: places of all rows at equal totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from jali.evaluation.arena.match import CLOSE
from jali.evaluation.arena.record import Record, Results, read_results
from jali.evaluation.arena.row import PUBLISHED, Row
from jali.evaluation.arena.score import METRICS
from jali.evaluation.quality.interval import FEWEST, POSITIVE, Interval, interval
from jali.evaluation.quality.measure import describe

DIGITS = {"psnr": 1, "ssim": 3, "lpips": 3}


@dataclass(frozen=True)
class Standing:
    """One row over the prompts that all rows beside it have.

    `behind` is the paired difference in PSNR to the first of its board, `ahead` that to the better
    control, both None for those themselves. Speed-ups are over the dense run of the same session,
    of whole clips and of their transformer calls.
    """

    row: Row
    clips: int
    achieved: float
    planning: float
    metrics: Mapping[str, Interval]
    speed_up: Interval | None
    speed_up_transformer: Interval | None
    seconds: float
    place: int = 0
    behind: Interval | None = None
    ahead: Interval | None = None

    @property
    def psnr(self) -> float:
        mean = self.metrics["psnr"].mean
        assert mean is not None
        return mean

    @property
    def is_tied(self) -> bool:
        """Whether it is not told apart from the first."""
        return self.behind is not None and not _certain(self.behind)

    @property
    def loses(self) -> bool:
        """Whether a control is better, and not by chance."""
        return self.ahead is not None and _certain(self.ahead) and self.is_below

    @property
    def is_below(self) -> bool:
        """Whether its mean is less than that of the better control."""
        return self.ahead is not None and self.ahead.mean is not None and self.ahead.mean < 0

    @property
    def is_open(self) -> bool:
        """Whether it is not told apart from the better control."""
        return self.ahead is not None and self.ahead.low is not None and not _certain(self.ahead)

    @property
    def is_off(self) -> bool:
        """Whether it did not cost what it should."""
        return self.row.total is not None and abs(self.achieved - self.row.total) > CLOSE

    @property
    def is_fair(self) -> bool:
        """Whether it did no more work than it should: only then it has a place."""
        return self.row.total is None or self.achieved <= self.row.total + CLOSE

    def to_dict(self) -> dict[str, Any]:
        said = asdict(self) | {
            "tied": self.is_tied, "loses": self.loses, "open": self.is_open, "off": self.is_off,
        }  # fmt: skip
        own = {"method": self.row.label, "schedule": self.row.spread, "total": self.row.total}
        return own | {name: value for name, value in said.items() if name != "row"}


@dataclass(frozen=True)
class Board:
    """All rows at one total on one schedule, the best first; or, without a total, those that are as
    published, each at its own."""

    schedule: str
    total: float | None
    prompts: int
    standings: tuple[Standing, ...]

    @property
    def title(self) -> str:
        return PUBLISHED if self.total is None else f"{self.total:g} of all work, {self.schedule}"

    @property
    def control(self) -> Standing | None:
        """The better one of those that did no more than their total."""
        return next((s for s in self.standings if s.row.is_control and s.is_fair), None)

    @property
    def tells_apart(self) -> bool:
        """Whether there are enough clips for an interval."""
        return self.prompts >= FEWEST

    def sentences(self) -> list[str]:
        """What the board says, plainly."""
        if self.total is None or not self.standings:
            return []
        first, said = self.standings[0], []
        at = f"At {self.total:g} ({self.schedule})"
        if not first.is_fair:
            return [f"{at} nothing is ranked: every row did more than that."]
        if not self.tells_apart:
            few = f"{self.prompts} prompt{'' if self.prompts == 1 else 's'}"
            said.append(
                f"{at} {first.row.label} has the highest PSNR, but {few} cannot tell rows apart: "
                f"it takes {FEWEST}."
            )
        else:
            tied = [s.row.label for s in self.standings if s.is_tied]
            beside = f"; not told apart from it: {', '.join(tied)}" if tied else ", alone"
            said.append(f"{at} {first.row.label} is first with {first.psnr:.1f} dB{beside}.")
        over = [f"{s.row.label} ({s.achieved:.3f})" for s in self.standings if not s.is_fair]
        if over:
            said.append(f"{at} these did more work than that and have no place: {', '.join(over)}.")
        return [*said, *self._said_of_controls(at)]

    def _said_of_controls(self, at: str) -> list[str]:
        control, said = self.control, []
        if control is None:
            return [f"{at} there is no control that did no more, so nothing is said of any."]
        below = [s for s in self.standings if s.is_below and not self.tells_apart]
        for words, chosen in (
            ("have a lower PSNR than the control", below),
            ("lose to the control", [s for s in self.standings if s.loses]),
            ("are not told apart from the control", [s for s in self.standings if s.is_open]),
        ):
            names = ", ".join(f"{s.row.label} ({differs(s.ahead)} dB)" for s in chosen)
            if chosen:
                said.append(f"{at} these {words} {control.row.label}: {names}.")
        if not said and self.tells_apart:
            said.append(f"{at} every method beats both controls.")
        return said


@dataclass(frozen=True)
class Leaderboard:
    """Boards of an arena, and what is missing on them."""

    results: Results
    boards: tuple[Board, ...]
    missing: tuple[str, ...] = ()  # rows that were asked for and have no record yet

    @classmethod
    def of(cls, results: Results, rows: Sequence[Row] = ()) -> Leaderboard:
        """All that was measured; `rows` are those that were asked for."""
        known = results.rows()
        keys = list(dict.fromkeys((row.spread, row.total) for row in (*rows, *known)))
        keys.sort(key=lambda key: key[1] is None)
        boards = [_board(results, key, [r for r in known if (r.spread, r.total) == key])
                  for key in keys]  # fmt: skip
        missing = tuple(str(row) for row in rows if row not in known)
        return cls(results, tuple(b for b in boards if b.standings), missing)

    @classmethod
    def read(cls, place: str | Path) -> Leaderboard:
        """That of an arena's folder, or of its `arena.json`."""
        return cls.of(read_results(Path(place)))

    @property
    def metrics(self) -> list[str]:
        found = {name for board in self.boards for s in board.standings for name in s.metrics}
        return [name for name in METRICS if name in found]

    @property
    def is_complete(self) -> bool:
        """Whether every row has all prompts."""
        many = len(self.results.prompts)
        return not self.missing and all(board.prompts == many for board in self.boards)

    def sentences(self) -> list[str]:
        said = [sentence for board in self.boards for sentence in board.sentences()]
        for name, why in self.results.unavailable.items():
            said.append(f"{describe(name).title} was not measured: {why}.")
        for name, why in self.results.failed.items():
            said.append(f"{name} failed and is left out: {why}.")
        if self.missing:
            said.append(f"Not made yet: {', '.join(self.missing)}.")
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what `arena.json` says besides what was measured."""
        return {
            "complete": self.is_complete,
            "boards": [
                {
                    "schedule": board.schedule,
                    "total": board.total,
                    "prompts": board.prompts,
                    "rows": [standing.to_dict() for standing in board.standings],
                }
                for board in self.boards
            ],
            "said": self.sentences(),
        }

    def __str__(self) -> str:
        lines = []
        for board in self.boards:
            lines += [f"{board.title}, {board.prompts} prompts"]
            for s in board.standings:
                place = f"{s.place:>2}" if s.place else "  "
                mark = "=" if s.is_tied else " "
                lines.append(f"{place}{mark} {s.row.label:<24} {s.achieved:.3f}  {s.psnr:.2f} dB")
        return "\n".join([*lines, *self.sentences()])


def differs(found: Interval | None) -> str:
    """A difference with its interval, in dB."""
    if found is None or found.mean is None:
        return ""
    half = "" if found.high is None else f" ± {found.high - found.mean:.1f}"
    return f"{found.mean:+.1f}{half}".replace("-", "−")


def plus_minus(found: Interval | None, digits: int) -> str:
    """A mean, and behind it how far it can be trusted."""
    if found is None or found.mean is None:
        return ""
    return f"{found.mean:.{digits}f} {spread(found, digits)}".rstrip()


def spread(found: Interval, digits: int) -> str:
    """Half of the interval; of too few values their range, where they are not the same."""
    if found.high is not None and found.mean is not None:
        return f"± {found.high - found.mean:.{digits}f}"
    ends = (min(found.values), max(found.values)) if found.values else ()
    said = dict.fromkeys(f"{end:.{digits}f}" for end in ends)
    return " – ".join(said) if len(said) > 1 else ""


def _certain(found: Interval) -> bool:
    """Whether an interval is there and leaves out 0; one of equal values may be that value."""
    if found.low is None or found.high is None:
        return False
    return found.low > 0 or found.high < 0


def _board(results: Results, key: tuple[str, float | None], rows: Sequence[Row]) -> Board:
    """Over the groups that all of its rows have: so a run that was cut compares like with like."""
    spread, total = key
    records = {row: results.of(row) for row in rows}
    if total is None:
        found = [_standing(results, row, list(own.values())) for row, own in records.items()]
        return Board(spread, None, min((s.clips for s in found), default=0), tuple(found))
    shared = sorted(set.intersection(*map(set, records.values()))) if records else []
    # Rows that began later than the others have nothing in common with them.
    if not shared:
        shared = sorted({first for own in records.values() for first in own})[:1]
        records = {row: own for row, own in records.items() if set(shared) <= set(own)}
    made = {row: [own[first] for first in shared] for row, own in records.items()}
    standings = [_standing(results, row, own) for row, own in made.items()]
    standings.sort(key=lambda s: (not s.is_fair, -s.psnr))
    fair = [s for s in standings if s.is_fair]
    first, control = fair[:1], [s for s in fair if s.row.is_control][:1]
    placed = [
        replace(
            s,
            place=number,
            behind=_difference(made, s, first[0]) if s is not first[0] else None,
            ahead=_difference(made, s, control[0]) if control and not s.row.is_control else None,
        )
        for number, s in enumerate(fair, 1)
    ]
    placed += [s for s in standings if not s.is_fair]
    return Board(spread, total, sum(len(results.group(f)) for f in shared), tuple(placed))


def _standing(results: Results, row: Row, records: Sequence[Record]) -> Standing:
    names = [name for name in METRICS if all(name in record.metrics for record in records)]
    sizes = [len(results.group(record.first)) for record in records]
    return Standing(
        row=row,
        clips=sum(sizes),
        achieved=_weighted([record.achieved for record in records], sizes),
        planning=_weighted([record.planning for record in records], sizes),
        metrics={name: interval(_clips(records, name), describe(name).bounds) for name in names},
        speed_up=_speed_up(results, records, "seconds"),
        speed_up_transformer=_speed_up(results, records, "seconds_transformer"),
        seconds=sum(record.seconds for record in records) / sum(sizes),
    )


def _weighted(values: Sequence[float], sizes: Sequence[int]) -> float:
    return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)


def _clips(records: Sequence[Record], metric: str) -> list[float]:
    return [value for record in records for value in record.metrics[metric]]


def _difference(made: Mapping[Row, Sequence[Record]], one: Standing, other: Standing) -> Interval:
    """In PSNR, clip by clip: what all rows find hard is in neither."""
    pairs = zip(_clips(made[one.row], "psnr"), _clips(made[other.row], "psnr"), strict=True)
    return interval([a - b for a, b in pairs])


def _speed_up(results: Results, records: Sequence[Record], what: str) -> Interval | None:
    """Over the dense runs of the same group and session: an interval over groups or, of fewer than
    three, the ratio to every single one of them."""
    ratios = speed_ups(results, records, what)
    if not ratios:
        return None
    if len(ratios) >= FEWEST:
        return interval([fmean(several) for several in ratios], POSITIVE)
    single = [ratio for several in ratios for ratio in several]
    return Interval(fmean(single), None, None, len(ratios), tuple(single))


def speed_ups(
    results: Results, records: Sequence[Record], what: str = "seconds"
) -> list[list[float]]:
    """Of every record, how much faster it is than each dense run of its group and session."""
    ratios = []
    for record in records:
        own = getattr(record, what)
        dense = [
            seconds
            for times in results.dense
            if (times.first, times.session) == (record.first, record.session)
            for seconds in getattr(times, what)
        ]
        if own and dense:
            ratios.append([seconds / own for seconds in dense])
    return ratios
