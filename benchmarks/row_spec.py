"""What a row of the quality benchmark is, and how it is written: `rd:samples=4 exponential .4 12`.

METHOD SCHEDULE TOTAL STEPS, with several totals or steps between commas. A method may have options,
`name:option=value,…`, whose values are Python's literals, JSON's words or bare ones. A schedule is
`esa` (a fifth of the steps and layer 0 dense, the rest flat), `exponential`, `linear`, `flat`, or
relative budgets along the run, `1,.5,.2`; `@.05` behind it is the least budget of a call.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.error import InputError
from jali.methods import METHODS, Method, Schedule
from jali.planning.curve import FLOOR, SHAPES, Curve
from jali.planning.site import Site
from jali.presets.method import read_method
from jali.value import suggest

ESA = "esa"
SCHEDULES = (ESA, *SHAPES)
WARMUP = 0.2
CACHED = "cached"
EXAMPLE = "'rd:samples=4 exponential .4 12'"
WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class RowSpec:
    """One row: a method, how its total is spread over the run, and how many steps that has."""

    name: str
    options: tuple[tuple[str, Any], ...]
    shape: str | tuple[float, ...]
    floor: float
    total: float
    steps: int

    @property
    def method(self) -> str:
        """As it is written, the same for the same options."""
        told = ",".join(f"{name}={value!r}".replace(" ", "") for name, value in self.options)
        return f"{self.name}:{told}" if told else self.name

    @property
    def schedule(self) -> str:
        shape = (
            self.shape if isinstance(self.shape, str) else ",".join(f"{x:g}" for x in self.shape)
        )
        return shape if self.floor == FLOOR else f"{shape}@{self.floor:g}"

    @property
    def key(self) -> dict[str, Any]:
        """What tells one row from another, in the file of results."""
        return {
            "method": self.method,
            "schedule": self.schedule,
            "total": self.total,
            "steps": self.steps,
        }

    def curve(self, total: float) -> Curve:
        return Curve(total, "flat" if self.shape == ESA else self.shape, self.floor)

    def spread(self, method: Method, total: float, layers: int) -> Schedule:
        """The method on its schedule; ValueError where a run of so many layers cannot cost that."""
        esa = self.shape == ESA
        made = Schedule(
            method,
            dense_steps=WARMUP if esa else 0,
            dense_layers=(0,) if esa else (),
            curve=self.curve(total),
        )
        # The last call of a run is never one of the dense ones, so the curve is asked for it.
        made.why_dense(Site(self.steps - 1, self.steps, layers - 1, layers), 1)
        return made

    def __str__(self) -> str:
        return f"{self.method} {self.schedule} {self.total:g} {self.steps}"


def parse_rows(text: str) -> list[RowSpec]:
    """All rows of a line."""
    words = text.split()
    if len(words) != 4:
        raise InputError(f"a row is METHOD SCHEDULE TOTAL STEPS, as in {EXAMPLE}, got {text!r}")
    name, options = _method(words[0])
    shape, floor = _schedule(words[1])
    rows = [
        RowSpec(name, options, shape, floor, total, steps)
        for total, steps in itertools.product(
            _numbers("a total", float, words[2], text), _numbers("steps", int, words[3], text)
        )
    ]
    for row in rows:
        if row.steps < 1:
            raise InputError(f"steps are a number above 0, got {row.steps} in {text!r}")
        try:
            row.curve(row.total)
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
    return read_method({"method": spec.name, "options": dict(spec.options)}, spec.method)


def _method(word: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    name, _, told = word.partition(":")
    known = [method for method in (*METHODS, CACHED) if method != "dense"]
    if name not in known:
        raise InputError(f"unknown method {name!r}{suggest(name, known)}")
    options = _options(told, word)
    if name == CACHED and options not in ({}, {"of": "rd"}):
        raise InputError(f"cached replays a book of entropy, cached:of=rd one of rd, got {word!r}")
    if name != CACHED:
        try:
            read_method({"method": name, "options": options}, name)
        except (ValueError, TypeError) as error:
            raise InputError(f"{word!r}: {error}") from None
    return name, tuple(sorted(options.items()))


def _options(told: str, word: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"x({told})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(part.arg is None for part in call.keywords):
            raise ValueError
        return {str(part.arg): _value(part.value) for part in call.keywords}
    except (SyntaxError, ValueError):
        raise InputError(
            f"options are name=value between commas, as in rd:samples=4,keep=0.25, got {word!r}"
        ) from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return WORDS.get(node.id, node.id)
    return ast.literal_eval(node)


def _schedule(word: str) -> tuple[str | tuple[float, ...], float]:
    told, _, least = word.partition("@")
    wrong = InputError(
        f"a schedule is one of {', '.join(SCHEDULES)} or numbers as in 1,.5,.2, and may have a "
        f"floor as in exponential@.05, got {word!r}"
    )
    try:
        floor = float(least) if "@" in word else FLOOR
        return (told if told in SCHEDULES else tuple(map(float, told.split(",")))), floor
    except ValueError:
        raise wrong from None


def _numbers(what: str, kind: type, word: str, text: str) -> list[Any]:
    try:
        return [kind(part) for part in word.split(",")]
    except ValueError:
        raise InputError(f"{what}: {word!r} is no number, in {text!r}") from None
