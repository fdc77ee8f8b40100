"""Methods as plain values: what YAML and JSON hold, read strictly and written in full.

A method is a `method` name, its `options`, and a `schedule` of when it is active. Every error names
the place in the file (`wan-t2v-14b.presets.mine.options.k_block`) and the names known there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jali.methods import METHODS, Method, Schedule, make_method, near
from jali.planning.budget import Budget
from jali.tokens.order import FrameWindows, Gilbert, Order, Raster, Tiled

REQUIRED: Any = object()
Reader = Callable[[Any, str], Any]


def fail(path: str, problem: str) -> NoReturn:
    raise ValueError(f"{path} {problem}")


# What a value may be. Each reader takes the value and its place, and returns it or refuses it.


def a_bool(value: Any, path: str) -> bool:
    return value if isinstance(value, bool) else fail(path, f"must be true or false, got {value!r}")


def an_int(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        fail(path, f"must be an int, got {value!r}")
    return value


def a_number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        fail(path, f"must be a finite number, got {value!r}")
    return value


def a_text(value: Any, path: str) -> str:
    return value if isinstance(value, str) else fail(path, f"must be text, got {value!r}")


def a_mapping(value: Any, path: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        fail(path, f"must be a mapping of names to values, got {value!r}")
    return value


def optional(read: Reader) -> Reader:
    return lambda value, path: None if value is None else read(value, path)


def list_of(read: Reader, length: int | None = None) -> Reader:
    def reader(value: Any, path: str) -> tuple[Any, ...]:
        wanted = "a list" if length is None else f"a list of {length}"
        if not isinstance(value, list | tuple) or length not in (None, len(value)):
            fail(path, f"must be {wanted}, got {value!r}")
        return tuple(read(item, f"{path}[{i}]") for i, item in enumerate(value))

    return reader


def one_of(*known: str) -> Reader:
    def reader(value: Any, path: str) -> str:
        if value not in known:
            fail(path, f"must be one of {', '.join(known)}, got {value!r}")
        return str(value)

    return reader


def a_budget(value: Any, path: str) -> Budget:
    """A number (the mean share), or mean, floor and ceiling by name."""
    if not isinstance(value, Mapping):
        number = a_number(value, path)
        return at(path, lambda: Budget(number))
    fields = Fields(value, path, ("mean", "floor", "ceiling"))
    mean = fields.take("mean", a_number)
    floor = fields.take("floor", optional(a_number), None)
    ceiling = fields.take("ceiling", a_number, 1.0)
    return at(path, lambda: Budget(mean, floor, ceiling))


def an_order(value: Any, path: str) -> Order:
    """'raster', 'gilbert', 'frame_windows', or {tiled: [t, h, w], first_frame_last: bool}."""
    plain: dict[str, Order] = {
        "raster": Raster(),
        "gilbert": Gilbert(),
        "frame_windows": FrameWindows(),
        "tiled": Tiled(),
    }
    if isinstance(value, str):
        return plain[one_of(*plain)(value, path)]
    fields = Fields(value, path, ("tiled", "first_frame_last"))
    window = fields.take("tiled", list_of(an_int, 3))
    first_frame_last = fields.take("first_frame_last", a_bool, False)
    return at(path, lambda: Tiled(window, first_frame_last))


def ranges(value: Any, path: str) -> dict[int, tuple[float, ...]]:
    """{ratio: [low, high]}; JSON can only write the ratios as text."""
    read = list_of(a_number, 2)
    return {
        _ratio(key, path): read(pair, f"{path}.{key}")
        for key, pair in a_mapping(value, path).items()
    }


def _ratio(key: Any, path: str) -> int:
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    return an_int(key, f"{path}: the level {key!r}")


# By the type a method's field is declared with, so that a new method needs nothing here.
READERS: dict[str, Reader] = {
    "bool": a_bool,
    "bool | None": optional(a_bool),
    "int": an_int,
    "int | None": optional(an_int),
    "float": a_number,
    "int | float": a_number,
    "str": a_text,
    "Budget": a_budget,
    "Order": an_order,
    "Ranges | Mapping[int, Range]": ranges,
    "tuple[int, ...]": list_of(an_int),
    "tuple[float, ...]": list_of(a_number),
    "tuple[int, int, int]": list_of(an_int, 3),
    "tuple[float, float, float] | None": optional(list_of(a_number, 3)),
}


@dataclass(frozen=True)
class Fields:
    """A mapping that may only hold known names."""

    data: Mapping[Any, Any]
    path: str
    known: tuple[str, ...]

    def __post_init__(self) -> None:
        for key in a_mapping(self.data, self.path):
            if key not in self.known:
                fail(self.path, f"has no key {key!r}{near(str(key), self.known)}")

    def take(self, key: str, read: Reader, default: Any = REQUIRED) -> Any:
        if key in self.data:
            return read(self.data[key], f"{self.path}.{key}")
        if default is REQUIRED:
            fail(self.path, f"needs the key {key!r}")
        return default


def at(path: str, build: Callable[[], Any]) -> Any:
    """What `build` makes; what it refuses is said with the place."""
    try:
        return build()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


METHOD_KEYS = ("method", "options", "schedule")
_SCHEDULE = tuple(f.name for f in dataclasses.fields(Schedule) if f.name != "inner")


def read_method(data: Mapping[Any, Any], path: str) -> Method:
    """The method of {method: name, options: {…}, schedule: {…}}; other keys are the caller's."""
    fields = Fields({k: v for k, v in data.items() if k in METHOD_KEYS}, path, METHOD_KEYS)
    name = fields.take("method", a_text)
    if name not in METHODS:
        fail(f"{path}.method", f"is unknown: {name!r}{near(name, METHODS)}")
    options = _options(METHODS[name], fields.take("options", a_mapping, {}), f"{path}.options")
    method: Method = at(f"{path}.options", lambda: make_method(name, **options))
    if "schedule" not in data:
        return method
    schedule = _options(Schedule, data["schedule"], f"{path}.schedule", _SCHEDULE)
    return at(f"{path}.schedule", lambda: Schedule(method, **schedule))


def _options(
    kind: type[Method], data: Any, path: str, names: Iterable[str] | None = None
) -> dict[str, Any]:
    types = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known = tuple(types if names is None else names)
    fields = Fields(a_mapping(data, path), path, known)
    return {name: fields.take(name, _reader(types[name], path)) for name in known if name in data}


def _reader(declared: Any, path: str) -> Reader:
    if declared not in READERS:
        fail(path, f"holds a value of type {declared}, which no file can hold")
    return READERS[declared]


def write_method(method: Method) -> dict[str, Any]:
    """The plain form of a method, every option included; `read_method` makes an equal one."""
    if not isinstance(method, Schedule):
        return {"method": _name(method), "options": _values(method, None)}
    if isinstance(method.inner, Schedule):
        raise ValueError("a Schedule inside a Schedule has no plain form; merge the two")
    inner = write_method(method.inner)
    return {**inner, "schedule": _values(method, _SCHEDULE)}


def _name(method: Method) -> str:
    if METHODS.get(method.name) is not type(method):
        raise ValueError(f"{method} is not one of jali's own methods: {', '.join(METHODS)}")
    return method.name


def _values(method: Method, names: Iterable[str] | None) -> dict[str, Any]:
    fields = dataclasses.fields(method)  # type: ignore[arg-type]
    known = [f.name for f in fields] if names is None else names
    return {name: _plain(name, getattr(method, name)) for name in known}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Budget):
        return dataclasses.asdict(value)
    if isinstance(value, Tiled):
        return {"tiled": list(value.window), "first_frame_last": value.first_frame_last}
    if isinstance(value, Raster | Gilbert) or value == FrameWindows():
        kinds = {Raster: "raster", Gilbert: "gilbert", FrameWindows: "frame_windows"}
        return kinds[type(value)]
    if name == "mask_ratios":
        return {str(ratio): list(pair) for ratio, pair in dict(value).items()}
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name}={value!r} has no plain form")
