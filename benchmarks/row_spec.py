"""What a row of the quality benchmark is, and how it is written: `rd:samples=8 exponential .4 12`.

METHOD SCHEDULE TOTAL STEPS, with several totals or steps between commas. Methods and schedules are
written as in `jali arena` (`jali/evaluation/arena/row.py`); `cached` is one more, which replays a
book.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.error import InputError
from jali.evaluation.arena.row import (
    MethodSpec,
    ScheduleSpec,
    read_method_spec,
    read_options,
    read_schedule,
)
from jali.methods import METHODS, Method, Schedule
from jali.value import suggest

CACHED = "cached"
EXAMPLE = "'rd:samples=8 exponential .4 12'"


@dataclass(frozen=True)
class RowSpec:
    """One row: a method, how its total is spread over the run, and how many steps that has."""

    of: MethodSpec
    on: ScheduleSpec
    total: float
    steps: int

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        return self.of.options

    @property
    def method(self) -> str:
        """As it is written, the same for the same options."""
        return str(self.of)

    @property
    def schedule(self) -> str:
        return str(self.on)

    @property
    def key(self) -> dict[str, Any]:
        """What tells one row from another, in the file of results."""
        return {
            "method": self.method,
            "schedule": self.schedule,
            "total": self.total,
            "steps": self.steps,
        }

    def spread(self, method: Method, total: float, layers: int) -> Schedule:
        """The method on its schedule; ValueError where a run of so many layers cannot cost that."""
        self.on.check(total, self.steps, layers)
        return self.on.over(method, total)

    def __str__(self) -> str:
        return f"{self.method} {self.schedule} {self.total:g} {self.steps}"


def parse_rows(text: str) -> list[RowSpec]:
    """All rows of a line."""
    words = text.split()
    if len(words) != 4:
        raise InputError(f"a row is METHOD SCHEDULE TOTAL STEPS, as in {EXAMPLE}, got {text!r}")
    method, schedule = _method(words[0]), read_schedule(words[1])
    rows = [
        RowSpec(method, schedule, total, steps)
        for total, steps in itertools.product(
            _numbers("a total", float, words[2], text), _numbers("steps", int, words[3], text)
        )
    ]
    for row in rows:
        if row.steps < 1:
            raise InputError(f"steps are a number above 0, got {row.steps} in {text!r}")
        try:
            row.on.curve(row.total)
        except ValueError as error:
            raise InputError(f"{text!r}: {error}") from None
    return rows


def read_rows(lines: Iterable[str]) -> list[RowSpec]:
    """The rows of many lines, each once; what follows a # is a remark."""
    told = (line.split("#")[0].strip() for line in lines)
    return list({str(row): row for line in told if line for row in parse_rows(line)}.values())


def read_plan(path: Path) -> list[RowSpec]:
    try:
        return read_rows(path.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def make(spec: RowSpec) -> Method:
    """The method of a row without its schedule; `cached` needs a book instead."""
    return spec.of.make()


def _method(word: str) -> MethodSpec:
    name, _, told = word.partition(":")
    known = [method for method in (*METHODS, CACHED) if method != "dense"]
    if name not in known:
        raise InputError(f"unknown method {name!r}{suggest(name, known)}")
    if name != CACHED:
        return read_method_spec(word)
    options = read_options(told, word)
    if options not in ({}, {"of": "rd"}):
        raise InputError(f"cached replays a book of entropy, cached:of=rd one of rd, got {word!r}")
    return MethodSpec(name, tuple(options.items()))


def _numbers(what: str, kind: type, word: str, text: str) -> list[Any]:
    try:
        return [kind(part) for part in word.split(",")]
    except ValueError:
        raise InputError(f"{what}: {word!r} is no number, in {text!r}") from None
