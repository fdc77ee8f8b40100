"""One published idea per file."""

from __future__ import annotations

import dataclasses
from typing import Any

from jali.methods.ada_bsa import AdaBsa
from jali.methods.control import Local, Random
from jali.methods.dense import Dense, FastestDense
from jali.methods.draft import Draft
from jali.methods.entropy import Entropy
from jali.methods.mass import Mass
from jali.methods.method import Method, Query, Scored
from jali.methods.psa import Psa
from jali.methods.radial import Radial
from jali.methods.rd import RateDistortion
from jali.methods.rf_v2 import RfV2
from jali.methods.schedule import Schedule
from jali.methods.sol import Sol
from jali.methods.sparge import Sparge
from jali.methods.sta import Sta
from jali.methods.svg import Svg
from jali.methods.svg2 import Svg2
from jali.methods.threshold import Thresholded
from jali.value import suggest

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Dense, Entropy, RateDistortion, Psa, RfV2, AdaBsa,
        Sol, Sparge, Draft, Mass,
        Radial, Sta, Svg, Svg2,
        Random, Local,
    )
}  # fmt: skip


def make_method(method: str | Method, **options: Any) -> Method:
    """A method by name, with its own options. An unknown name or option lists the known ones."""
    if isinstance(method, Method):
        if options:
            raise TypeError(f"{method} is complete; {sorted(options)} cannot be added to it")
        return method
    if not isinstance(method, str):
        raise TypeError(f"a method is a name or a Method, got {method!r}")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}{suggest(method, METHODS)}")
    known = _options(method)
    for option in options:
        if option not in known:
            others = [name for name in METHODS if option in _options(name)]
            hint = f" (an option of {', '.join(others)})" if others else ""
            raise ValueError(f"{method} has no option {option!r}{hint}{suggest(option, known)}")
    return METHODS[method](**options)


def _options(method: str) -> list[str]:
    return [f.name for f in dataclasses.fields(METHODS[method])]  # type: ignore[arg-type]


__all__ = [
    "METHODS",
    "AdaBsa",
    "Dense",
    "Draft",
    "Entropy",
    "FastestDense",
    "Local",
    "Mass",
    "Method",
    "Psa",
    "Query",
    "Radial",
    "Random",
    "RateDistortion",
    "RfV2",
    "Schedule",
    "Scored",
    "Sol",
    "Sparge",
    "Sta",
    "Svg",
    "Svg2",
    "Thresholded",
    "make_method",
]
