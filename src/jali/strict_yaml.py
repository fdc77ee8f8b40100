"""YAML that people write: read strictly, and refused in one short sentence."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import yaml

from jali.error import shorten

# A file written by hand has far less than this; what has more would fill memory.
MOST_CHARACTERS, MOST_VALUES = 1_000_000, 100_000
MOST_BYTES = 4 * MOST_CHARACTERS


def parse_yaml(text: str) -> Any:
    """The value of a text; ValueError, on one line, where it is not YAML or stands for too much.

    >>> parse_yaml("{a: 1, a: 2}")
    Traceback (most recent call last):
    ValueError: line 1: the key 'a' is given twice
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    try:
        data = yaml.load(text, Loader=_UniqueKeys)
        _count(data, MOST_VALUES)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(shorten(error)) from None
    return data


def _count(value: Any, left: int) -> int:
    """How many values may still follow. An alias counts each time it is read, so that a few lines
    cannot stand for millions."""
    parts: Iterable[Any] = ()
    if isinstance(value, int) and abs(value) >= 10**20:
        raise ValueError("it holds a number of more than 20 digits")
    if isinstance(value, Mapping):
        parts = itertools.chain(value.keys(), value.values())
    elif isinstance(value, list):
        parts = value
    for part in parts:
        left = _count(part, left)
    if left <= 0:
        raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
    return left - 1


class _UniqueKeys(yaml.SafeLoader):
    """A key given twice is a mistake; plain YAML keeps the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key: Hashable = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ValueError(f"line {line}: the key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)
