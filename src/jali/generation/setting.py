"""One setting: what it may be, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jali import files
from jali.error import ArgumentError, show

COUNT, MOST = "a count of at least 1", 1_000_000
RULES = {str: "text", Path: "text", bool: "true or false", Mapping: "names with their values"}


class SettingError(ArgumentError):
    """A value that a setting cannot have: `name` and what it `must` be, the value included."""


@dataclass(frozen=True, slots=True)
class SettingDescription:
    """What a setting takes, and the words for it: checks and command-line options are made of it.

    `flag` is the option where it is not the setting's name, `shown` stands for the default in a
    help text, and `usual` is the command line's own default.
    """

    kind: Any  # int, float, bool, str, Path (kept as text) or Mapping
    help: str
    panel: str | None
    rule: str = ""  # what a number must be
    least: float = -math.inf
    most: float = math.inf
    others: tuple[Any, ...] = ()  # values of another kind
    flag: str | None = None
    shown: str | None = None
    usual: Any = None

    def takes(self, value: Any) -> bool:
        """Whether this may be the setting's value."""
        if self.kind in (int, float):
            number = (int, float) if self.kind is float else int
            if isinstance(value, bool) or not isinstance(value, number):
                return False
            return self.least <= value <= self.most and abs(value) != math.inf
        if self.kind in (str, Path):
            return isinstance(value, str) and (bool(value.strip()) or value in self.others)
        return isinstance(value, self.kind) or value in self.others

    def can_be_written(self, value: Any) -> bool:
        """Whether a manifest can hold it: bytes that are no UTF-8 arrive as half letters."""
        try:
            return bool(files.canonical(value).encode())
        except (TypeError, ValueError, RecursionError):
            return False

    def check(self, name: str, value: Any) -> None:
        if not self.takes(value):
            must = self.rule or RULES[self.kind]
            if isinstance(value, int) and value > self.most and "at most" not in must:
                must += f" and at most {self.most:,}"
            raise SettingError(name, f"must be {must}, got {show(value)}")
        if not self.can_be_written(value):
            must = "text in UTF-8" if isinstance(value, str) else "values that JSON can hold"
            raise SettingError(name, f"must be {must}, got {show(value)}")


def setting(kind: Any, default: Any, panel: str | None, help: str, **more: Any) -> Any:
    """A field of `Settings` with its description."""
    about = {"description": SettingDescription(kind, help, panel, **more)}
    if default is Mapping:
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def count(default: int | None, panel: str, help: str) -> Any:
    """A whole number of at least 1; where it is None, the model has its own."""
    shown = "the model's" if default is None else None
    return setting(int, default, panel, help, rule=COUNT, least=1, most=MOST, shown=shown)
