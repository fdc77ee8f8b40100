"""Methods as plain values: a `method` by name, its `options`, and a `schedule`.

Options are read and written by the types a method declares them with, so that every class in
`jali.methods.METHODS` has its place in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jali.methods import METHODS, Method, Schedule, make_method
from jali.presets.schema import ABSENT, errors_at, fail, read_fields, read_object, write_fields
from jali.value import suggest


@dataclass(frozen=True)
class PlainMethod:
    """A method as a file has it."""

    method: str
    options: Mapping[Any, Any] = ABSENT
    schedule: Mapping[Any, Any] = ABSENT


METHOD_KEYS = ("method", "options", "schedule")


def read_method(data: Mapping[Any, Any], path: str) -> Method:
    """The method of {method: name, options: {…}, schedule: {…}}; other keys are the caller's.

    `ValueError` names the place (`path` and what follows) of a key or value that is none.
    """
    own = {key: value for key, value in data.items() if key in METHOD_KEYS}
    plain: PlainMethod = read_object(PlainMethod, own, path)
    if plain.method not in METHODS:
        fail(f"{path}.method", f"is unknown: {plain.method!r}{suggest(plain.method, METHODS)}")
    options = read_fields(METHODS[plain.method], plain.options or {}, f"{path}.options")
    with errors_at(f"{path}.options"):
        method = make_method(plain.method, **options)
    if "schedule" not in data:
        return method
    schedule = read_fields(Schedule, plain.schedule, f"{path}.schedule", without=("inner",))
    with errors_at(f"{path}.schedule"):
        return Schedule(method, **schedule)


def write_method(method: Method) -> dict[str, Any]:
    """The plain form of a method, every option included; `read_method` makes an equal one."""
    if not isinstance(method, Schedule):
        if METHODS.get(method.name) is not type(method):
            raise ValueError(f"{method} is not in jali.methods.METHODS: {', '.join(METHODS)}")
        return {"method": method.name, "options": write_fields(method)}
    if isinstance(method.inner, Schedule):
        raise ValueError("a Schedule inside a Schedule has no plain form; merge the two")
    return {**write_method(method.inner), "schedule": write_fields(method, without=("inner",))}
