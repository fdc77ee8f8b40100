"""Plain values, as YAML and JSON hold them, to typed ones and back.

A dataclass is its own schema: its fields say which keys a mapping may have, of which types, and
what holds where one is missing. Every error names the place in the file
(`wan-t2v-14b.presets.mine.options.k_block`), what was found there and what is known there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NewType, NoReturn, Union

from jali.planning.budget import Budget
from jali.planning.curve import Curve
from jali.tokens.order import FrameWindows, Gilbert, Order, Raster, Tiled
from jali.value import suggest

ABSENT: Any = None  # default of a field that a file may leave out, but not set to null
Count = NewType("Count", int)  # an int >= 0


def fail(path: str, problem: str) -> NoReturn:
    raise ValueError(f"{path} {problem}")


@contextlib.contextmanager
def errors_at(path: str) -> Iterator[None]:
    """What is refused inside the block is refused with its place in the file."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


# Reading


def read(declared: Any, value: Any, path: str) -> Any:
    """`value`, found at `path`, as the type `declared`; `ValueError` where it is none.

    A type is one of `READERS`, a dataclass, or a union, Literal, tuple or mapping of such.
    """
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if declared is Any:
        return value
    if declared in READERS:
        return READERS[declared](value, path)
    if origin in (Union, UnionType):
        return _read_union(inner, value, path)
    if origin is Literal:
        if not any(type(value) is type(known) and value == known for known in inner):
            fail(path, f"must be one of {', '.join(map(str, inner))}, got {value!r}")
        return value
    if origin is tuple:
        return _read_tuple(inner, value, path)
    if _is_mapping(declared):
        return {
            _read_key(inner[0], key, path): read(inner[1], item, f"{path}.{key}")
            for key, item in _mapping(value, path).items()
        }
    if dataclasses.is_dataclass(declared):
        return read_object(declared, value, path)
    fail(path, f"holds a value of type {declared}, which no file can hold")


def read_object(kind: Any, data: Any, path: str) -> Any:
    """A dataclass from a mapping of its fields."""
    values = read_fields(kind, data, path)
    with errors_at(path):
        return kind(**values)


def read_fields(kind: Any, data: Any, path: str, without: Collection[str] = ()) -> dict[str, Any]:
    """The values that a mapping gives to the fields of a dataclass."""
    types = field_types(kind)
    fields = {f.metadata.get("key", f.name): f for f in dataclasses.fields(kind)}
    fields = {key: field for key, field in fields.items() if key not in without}
    for key in _mapping(data, path):
        if key not in fields:
            fail(path, f"has no key {key!r}{suggest(str(key), fields)}")
    for key, field in fields.items():
        if key not in data and field.default is field.default_factory is dataclasses.MISSING:
            fail(path, f"needs the key {key!r}")
    return {
        field.name: read(types[field.name], data[key], f"{path}.{key}")
        for key, field in fields.items()
        if key in data
    }


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """The type of every field of a dataclass."""
    try:
        hints = typing.get_type_hints(kind)
    except NameError as error:
        raise TypeError(
            f"{kind.__name__} declares a type that its module does not know: {error}"
        ) from error
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _read_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    if set(kinds) - {NoneType} == {int, float}:
        return read(float, value, path)
    for kind in kinds:
        if isinstance(value, str) and typing.get_origin(kind) is Literal:
            return read(kind, value, path)
    # What may be written as a mapping is: its keys say what the values are.
    kinds = tuple(filter(_is_mapping, kinds)) or tuple(k for k in kinds if k is not NoneType)
    if len(kinds) == 1:
        return read(kinds[0], value, path)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return read(kind, value, path)
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    fail(path, f"must be {names}, got {value!r}")


def _read_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    any_length = kinds[-1:] == (...,)
    if not isinstance(value, list | tuple) or not (any_length or len(value) == len(kinds)):
        size = "" if any_length else f" of {len(kinds)}"
        brackets = " in brackets" if isinstance(value, str) else ""
        fail(path, f"must be a list{size}{brackets}, got {value!r}")
    kinds = kinds[:1] * len(value) if any_length else kinds
    return tuple(read(kinds[i], item, f"{path}[{i}]") for i, item in enumerate(value))


def _read_key(kind: Any, key: Any, path: str) -> Any:
    """JSON can only write keys as text."""
    if kind is int and isinstance(key, str) and key.isdecimal():
        return int(key)
    return read(kind, key, f"{path}: the key {key!r}")


def _mapping(value: Any, path: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        fail(path, f"must be a mapping of names to values, got {value!r}")
    return value


def _is_mapping(declared: Any) -> bool:
    origin = typing.get_origin(declared)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _scalar(kinds: Any, words: str, fits: Callable[[Any], bool] = lambda _: True) -> Any:
    """A reader of one of `kinds`, where true and false are no numbers."""

    def reader(value: Any, path: str) -> Any:
        right = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        return value if right and fits(value) else fail(path, f"must be {words}, got {value!r}")

    return reader


def _budget(value: Any, path: str) -> Budget:
    """A number (the mean share), or mean, floor and ceiling by name."""
    if not isinstance(value, Mapping):
        value = {"mean": read(float, value, path)}
    if "mean" not in value:
        fail(path, "needs the key 'mean'")
    budget: Budget = read_object(Budget, value, path)
    return budget


@dataclasses.dataclass(frozen=True)
class _PlainTiled:
    tiled: tuple[int, int, int]
    first_frame_last: bool = False


def _order(value: Any, path: str) -> Order:
    """'raster', 'gilbert', 'frame_windows', or {tiled: [t, h, w], first_frame_last: bool}."""
    if isinstance(value, str):
        return _ORDERS[read(Literal[*_ORDERS], value, path)]
    plain: _PlainTiled = read_object(_PlainTiled, value, path)
    with errors_at(path):
        return Tiled(plain.tiled, plain.first_frame_last)


_ORDERS: dict[str, Order] = {
    "raster": Raster(), "gilbert": Gilbert(), "frame_windows": FrameWindows(), "tiled": Tiled(),
}  # fmt: skip
READERS: dict[Any, Callable[[Any, str], Any]] = {
    bool: _scalar(bool, "true or false"),
    int: _scalar(int, "an int"),
    Count: _scalar(int, "a count >= 0", lambda value: value >= 0),
    float: _scalar((int, float), "a finite number", math.isfinite),  # 1 may count, 1.0 be a share
    str: _scalar(str, "text"),
    Budget: _budget,
    Order: _order,
}


# Writing


def write(value: Any) -> Any:
    """The plain form of a value; `read` makes an equal one of it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Budget):
        return dataclasses.asdict(value)
    if isinstance(value, Curve):
        return write_fields(value)
    if isinstance(value, Tiled):
        return {"tiled": list(value.window), "first_frame_last": value.first_frame_last}
    if isinstance(value, Mapping):
        return {str(key): write(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [write(item) for item in value]
    for name, order in _ORDERS.items():
        if value == order:
            return name
    raise ValueError(f"{value!r} has no plain form")


def write_fields(values: Any, without: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass in plain form; pairs are a mapping where one is declared."""
    plain = {}
    kind: Any = type(values)
    for name, declared in field_types(kind).items():
        value = getattr(values, name)
        if isinstance(value, tuple) and any(map(_is_mapping, typing.get_args(declared))):
            value = dict(value)
        if name not in without:
            with errors_at(f"{kind.__name__}.{name}"):
                plain[name] = write(value)
    return plain
