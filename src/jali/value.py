"""What a single value must be, and the words where it is not."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any


def suggest(name: str, known: Collection[Any]) -> str:
    """'; did you mean …? known: …'"""
    likeness = 0.5 if len(name) <= 5 else 0.6  # a letter of a short word is much of it
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    guess = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{guess} known: {', '.join(map(str, known))}"


def check_choice(name: str, value: Any, known: Collection[Any]) -> None:
    """One of a few words."""
    if value not in known:
        *most, last = map(repr, known)
        raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """A count is an int, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_amount(name: str, value: Any) -> None:
    """An amount is a finite real number, at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and >= 0, got {value}")


def check_share(name: str, value: float) -> None:
    """A share is a real number in 0..1; NaN is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number in [0, 1], got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def check_steps(name: str, value: int | float) -> None:
    """Some of the steps of a run: a count (int), or a share of them (float)."""
    if isinstance(value, float):
        check_share(name, value)
    elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is a share in [0, 1] or a count of steps, got {value!r}")
