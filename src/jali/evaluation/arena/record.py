"""`arena.json`: what was measured so far, row by row and group of prompts by group.

It is whole after every row of every group, so whatever interrupts an arena costs one of them. What
is derived from it (places, intervals) is made anew whenever it is asked for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jali.error import InputError, shorten
from jali.evaluation.arena.row import PUBLISHED, Row, read_method_spec, read_schedule
from jali.evaluation.arena.score import METRICS
from jali.files import read_json, write_json
from jali.generation.folder import visible_names
from jali.presets import schema
from jali.value import check_count, check_share

log = logging.getLogger("jali")

NAME, KIND = "arena.json", "jali-arena"
RUNS, DENSE = "runs", "dense"


@dataclass(frozen=True)
class Record:
    """One row on one group of prompts, those from number `first` on. `asked` is what the schedule
    was asked for so that it would cost the total, `tries` (asked, achieved) of all attempts, the
    nearest first; metrics are lists, one number a clip. Seconds are those of the whole group."""

    method: str
    schedule: str
    total: float | None
    first: int
    session: int
    achieved: float
    planning: float
    seconds: float
    metrics: Mapping[str, tuple[float, ...]]
    asked: float | None = None
    tries: tuple[tuple[float, float], ...] = ()
    seconds_transformer: float | None = None
    backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("achieved", "asked", "total"):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name))
        check_count("first", self.first, least=0)
        if not self.seconds > 0 or not (self.seconds_transformer or 1) > 0 or self.planning < 0:
            raise ValueError("seconds are above 0, and planning is no less than that")
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown or "psnr" not in self.metrics:
            raise ValueError(f"metrics are {', '.join(METRICS)}, got {', '.join(self.metrics)}")

    @functools.cached_property
    def row(self) -> Row:
        own = None if self.schedule == PUBLISHED else read_schedule(self.schedule)
        return Row(read_method_spec(self.method), own, self.total)


@dataclass(frozen=True)
class DenseTimes:
    """How long the dense run of a group took in one session, each time it was made there."""

    first: int
    session: int
    seconds: tuple[float, ...]
    seconds_transformer: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.seconds or min(*self.seconds, *self.seconds_transformer, 1) <= 0:
            raise ValueError("the dense run has its seconds, above 0")


@dataclass(frozen=True)
class Results:
    """An arena: what decides its clips (dense settings, prompts, how many at once, the device), and
    what was measured."""

    settings: Mapping[str, Any]
    prompts: tuple[str, ...]
    batch: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    jali: str
    date: str = ""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    dense: tuple[DenseTimes, ...] = ()
    records: tuple[Record, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("batch", self.batch)
        for first in (*(r.first for r in self.records), *(d.first for d in self.dense)):
            if first not in self.firsts:
                raise ValueError(f"there is no group of prompts that begins with {first}")
        for record in self.records:
            here = len(self.group(record.first))
            if any(len(values) != here for values in record.metrics.values()):
                raise ValueError(f"a group of {here} prompts has so many numbers of every metric")
        keys = [(record.row, record.first) for record in self.records]
        if len(set(keys)) < len(keys):
            raise ValueError("a row has two records of the same prompts")

    @property
    def firsts(self) -> range:
        """Where the groups begin."""
        return range(0, len(self.prompts), self.batch)

    def group(self, first: int) -> range:
        """The numbers of the prompts of one group."""
        return range(first, min(first + self.batch, len(self.prompts)))

    @property
    def session(self) -> int:
        """The number of a session that begins now."""
        return 1 + max((times.session for times in self.dense), default=-1)

    def of(self, row: Row) -> dict[int, Record]:
        """The records of a row, by where their groups begin."""
        return {record.first: record for record in self.records if record.row == row}

    def rows(self) -> list[Row]:
        """Those that have records."""
        return list(dict.fromkeys(record.row for record in self.records))

    def with_record(self, record: Record) -> Results:
        failed = {name: why for name, why in self.failed.items() if name != str(record.row)}
        return replace(self, records=(*self.records, record), failed=failed)

    def with_dense(self, found: DenseTimes) -> Results:
        """With one more time of the dense run in its session."""
        before = [d for d in self.dense if (d.first, d.session) == (found.first, found.session)]
        if before:
            found = replace(
                found,
                seconds=before[0].seconds + found.seconds,
                seconds_transformer=before[0].seconds_transformer + found.seconds_transformer,
            )
        others = [d for d in self.dense if d not in before]
        return replace(self, dense=(*others, found))

    def write(self, folder: Path, **more: Any) -> None:
        said = {"kind": KIND, "version": 1, **asdict(self), **more}
        write_json(folder / NAME, said, sort_keys=False)


def read_results(place: Path) -> Results:
    """The arena in a folder, or in a file; `InputError` where there is none that can be read."""
    path = place / NAME if place.is_dir() else place
    try:
        data = read_json(path, KIND)
    except FileNotFoundError:
        raise InputError(f"{place} holds no arena: there is no {NAME}") from None
    own = {name: data[name] for name in schema.field_types(Results) if name in data}
    try:
        found: Results = schema.read(Results, own, "arena")
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged: {shorten(error)}") from None
    return found


def find_results(folder: Path, wanted: Results) -> Results:
    """What a folder holds of this arena, or nothing yet. Refuses another arena's, and any other."""
    names = visible_names(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, and an arena needs a folder")
    if NAME not in names:
        # What a process left that was killed before its first record lies in `runs`.
        if [name for name in names if name != RUNS]:
            some = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
            raise InputError(
                f"{folder} holds {some} and no {NAME}, so it is no arena; choose another folder"
            )
        return wanted
    found = read_results(folder)
    other = _differences(found, wanted)
    if other:
        raise InputError(
            f"{folder} is another arena: {'; '.join(other[:3])}. Choose another folder, or the "
            f"same settings to go on with it"
        )
    _warn_of_changes(folder, found, wanted)
    here = {name: getattr(wanted, name) for name in ("machine", "versions", "jali", "date")}
    return replace(found, **here)


def _warn_of_changes(folder: Path, there: Results, here: Results) -> None:
    """Rows of other versions are compared all the same, but not silently."""
    before, now = ({"jali": one.jali, **one.versions} for one in (there, here))
    for name, version in now.items():
        if before.get(name) != version:
            log.warning(
                "jali: %s goes on with another %s than before: %s, not %s",
                folder, name, version, before.get(name),
            )  # fmt: skip


def _differences(there: Results, here: Results) -> list[str]:
    """In words, what besides its rows tells one arena from another."""
    names = list(dict.fromkeys([*here.settings, *there.settings]))
    found = [
        f"{name} is {there.settings.get(name)!r:.80}, not {here.settings.get(name)!r:.80}"
        for name in names
        if there.settings.get(name) != here.settings.get(name)
    ]
    if there.prompts != here.prompts:
        first = _first_other(there.prompts, here.prompts)
        found.append(
            f"it has {len(there.prompts)} prompts, and here are {len(here.prompts)}"
            if first is None
            else f"prompt {first} is {there.prompts[first]!r:.60}, not {here.prompts[first]!r:.60}"
        )
    if there.batch != here.batch:
        found.append(f"batch is {there.batch}, not {here.batch}")
    if there.machine.get("device") != here.machine.get("device"):
        found.append(
            f"it was made on {there.machine.get('device')!s:.60}, and this is "
            f"{here.machine.get('device')}"
        )
    return found


def _first_other(one: Sequence[str], other: Sequence[str]) -> int | None:
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), None)
