"""What takes part: a method with its options, how a total is spread over a run, and the total.

A method is written `name:option=value,…`, its values being Python's literals, JSON's words or bare
ones. A schedule is `graded` (or `exponential`), `linear`, `flat`, `esa` (a fifth of the steps and
layer 0 dense, the rest flat), or relative budgets along the run, `1,.5,.2`; `*1,.8,1.2` behind it
are factors of the layers, and `@.05` is the least budget of a call. Read without torch, as far as
that goes.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jali.error import InputError
from jali.evaluation.arena.match import UnreachableError
from jali.files import digest
from jali.name import CONTROLS, method_names
from jali.planning.curve import FLOOR, SHAPES, Curve
from jali.value import suggest

if TYPE_CHECKING:
    from jali.methods import Method, Schedule

ALL = "all"
ESA, GRADED, PUBLISHED = "esa", "graded", "as published"
SCHEDULES = (ESA, *SHAPES)
WARMUP = 0.2
LONGEST = 80  # letters of a folder's name
WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class MethodSpec:
    """A method by name, with some of its options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """The same for the same options."""
        told = ",".join(f"{name}={value!r}".replace(" ", "") for name, value in self.options)
        return f"{self.name}:{told}" if told else self.name

    def make(self) -> Method:
        from jali.presets.method import read_method

        return read_method({"method": self.name, "options": dict(self.options)}, self.name)


@dataclass(frozen=True)
class ScheduleSpec:
    """How a total is spread over a run: a shape, the least budget of a call, and factors of the
    layers, one for each or none."""

    shape: str | tuple[float, ...]
    floor: float = FLOOR
    layers: tuple[float, ...] = ()

    def __str__(self) -> str:
        said = self.shape if isinstance(self.shape, str) else _commas(self.shape)
        said += f"*{_commas(self.layers)}" if self.layers else ""
        return said if self.floor == FLOOR else f"{said}@{self.floor:g}"

    def curve(self, total: float) -> Curve:
        shape = "flat" if self.shape == ESA else self.shape
        return Curve(total, shape, self.floor, self.layers)

    def check(self, total: float, steps: int, layers: int = 1) -> None:
        """Refuse a total that such a run cannot cost. With one layer it is asked of any number."""
        dense = math.ceil(WARMUP * steps - 1e-9) if self.shape == ESA else 0
        first = self.shape == ESA and layers > 1
        layers = max(layers, len(self.layers))
        try:
            self.curve(total).budgets(
                steps, layers, lambda step, layer: step < dense or (first and layer == 0)
            )
        except ValueError as error:
            raise UnreachableError(f"schedule {self}: {error}") from None

    def over(self, method: Method, total: float) -> Schedule:
        """The method with budgets that make a run cost the total."""
        from jali.methods import Schedule

        esa = self.shape == ESA
        return Schedule(
            method,
            dense_steps=WARMUP if esa else 0,
            dense_layers=(0,) if esa else (),
            curve=self.curve(total),
        )


@dataclass(frozen=True)
class Row:
    """One row of the arena. Without a total it is a method as published: at its own defaults, on a
    schedule of its own, whatever that costs."""

    method: MethodSpec
    schedule: ScheduleSpec | None
    total: float | None

    @property
    def label(self) -> str:
        """The method as written."""
        return str(self.method)

    @property
    def spread(self) -> str:
        """The schedule as written."""
        return PUBLISHED if self.schedule is None else str(self.schedule)

    @property
    def is_control(self) -> bool:
        return self.method.name in CONTROLS

    @property
    def folder(self) -> str:
        """A name for its clips."""
        said = re.sub(r"[^a-z0-9.]+", "-", str(self).lower()).strip("-")
        # Two ways to write options may read alike without their signs.
        unsure = self.method.options or len(said) > LONGEST
        return f"{said[:LONGEST]}-{digest(str(self))[:6]}" if unsure else said

    def __str__(self) -> str:
        total = "" if self.total is None else f" {self.total:g}"
        return f"{self.method} {self.spread}{total}"

    def scheduled(self, asked: float | None) -> Schedule:
        """The method on its schedule, asked for a total; as published it has its own."""
        from jali.methods import Schedule

        method = self.method.make()
        if self.schedule is None:
            return Schedule(method, **method.own_schedule)
        assert asked is not None
        return self.schedule.over(method, asked)


def row_of(method: Method, curve: Curve) -> Row:
    """A method on a curve, as a recipe has them."""
    from jali.presets.method import write_method

    own, usual = (write_method(one)["options"] for one in (method, type(method)()))
    options = {n: _hashable(value) for n, value in own.items() if usual.get(n) != value}
    spread = ScheduleSpec(curve.shape, curve.floor, curve.layers)
    return Row(MethodSpec(method.name, tuple(sorted(options.items()))), spread, curve.total)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def make_rows(
    methods: Sequence[MethodSpec], schedules: Sequence[ScheduleSpec], totals: Sequence[float]
) -> list[Row]:
    """Every method and both controls, on every schedule at every total; then, as published, those
    that have no budget of their own, or a schedule of their own."""
    named = {method.name for method in methods}  # a control may come with options
    controls = [MethodSpec(name) for name in CONTROLS if name not in named]
    several = list(dict.fromkeys([*methods, *controls]))
    rows = [
        Row(method, schedule, total)
        for schedule, total, method in itertools.product(schedules, totals, several)
    ]
    return rows + [Row(method, None, None) for method in several if _is_published(method)]


def _is_published(spec: MethodSpec) -> bool:
    """Whether there is a way in which its authors run it, whatever that costs."""
    from jali.methods import Method

    made = spec.make()
    own = made.own_schedule is not Method.own_schedule
    return spec.name not in CONTROLS and (own or made.mean_budget in (None, 1))


# Words


def split_methods(given: str | Iterable[str], flag: str = "methods") -> list[str]:
    """Methods between commas or spaces, each with its options; `all` is every one but dense."""
    words = given.split() if isinstance(given, str) else list(given)
    found: list[str] = []
    for part in itertools.chain.from_iterable(map(_outside_brackets, words)):
        if found and ":" in found[-1] and re.match(r"\w+=", part):
            found[-1] += f",{part}"  # one more option of the method before
        else:
            found.append(part)
    known = [name for name in method_names() if name != "dense"]
    found = [m for word in found for m in (known if word == ALL else [word])]
    if not found:
        raise InputError(f"{flag}: name at least one: {', '.join([ALL, *known])}")
    for word in found:
        name = word.partition(":")[0]
        if name not in known:
            raise InputError(f"{flag}: unknown method {name!r}{suggest(name, [ALL, *known])}")
    return list(dict.fromkeys(found))


def _outside_brackets(word: str) -> Iterator[str]:
    """The parts between commas that stand in no brackets."""
    depth, part = 0, ""
    for sign in word:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth <= 0:
            yield part
            part = ""
        else:
            part += sign
    yield from filter(None, [part])


def read_method_spec(word: str) -> MethodSpec:
    """`name:option=value,…`; whatever such a method has not is refused."""
    name, _, told = word.partition(":")
    options = read_options(told, word)
    spec = MethodSpec(name, tuple(sorted(options.items())))
    try:
        spec.make()
    except (ValueError, TypeError) as error:
        raise InputError(f"{word!r}: {error}") from None
    return spec


def read_options(told: str, word: str) -> dict[str, Any]:
    """The options behind the colon of `word`."""
    try:
        call = ast.parse(f"x({told})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(part.arg is None for part in call.keywords):
            raise ValueError
        return {str(part.arg): _value(part.value) for part in call.keywords}
    except (SyntaxError, ValueError):
        raise InputError(
            f"options are name=value between commas, as in rd:samples=8,keep=0.25, got {word!r}"
        ) from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return WORDS.get(node.id, node.id)
    return ast.literal_eval(node)


def _commas(numbers: Sequence[float]) -> str:
    return ",".join(f"{x:g}" for x in numbers)


def read_schedule(word: str) -> ScheduleSpec:
    """A shape, with factors of layers and a floor where it has its own."""
    told, _, least = word.partition("@")
    told, _, factors = told.partition("*")
    told = "exponential" if told == GRADED else told
    try:
        floor = float(least) if "@" in word else FLOOR
        shape = told if told in SCHEDULES else tuple(map(float, told.split(",")))
        layers = tuple(map(float, factors.split(","))) if "*" in word else ()
    except ValueError:
        raise InputError(
            f"a schedule is one of {', '.join(SCHEDULES)} or numbers as in 1,.5,.2, and may have a "
            f"floor as in exponential@.05 or factors of layers as in linear*1,.8, got {word!r}"
        ) from None
    return ScheduleSpec(shape, floor, layers)


def read_schedules(given: str | Iterable[str], flag: str = "schedule") -> list[ScheduleSpec]:
    """Names between commas, or shapes in numbers between spaces."""
    words = given.split() if isinstance(given, str) else list(given)
    several = [part for word in words for part in re.split(r",(?=[a-z])", word) if part]
    try:
        found = list(dict.fromkeys(map(read_schedule, several)))
        for schedule in found:
            schedule.curve(1.0)
    except ValueError as error:
        raise InputError(f"{flag}: {error}") from None
    return found
