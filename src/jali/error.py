"""The ways in which something does not work out, each told in one sentence for people."""

from __future__ import annotations

import re
from collections.abc import Callable

LONGEST = 300  # letters of a sentence; three lines of a terminal


class InputError(ValueError):
    """What was given cannot be used as asked: it is the person's to change (exit code 2)."""


class ArgumentError(InputError):
    """An argument that cannot be: its `name`, and what it must be, or after a colon a sentence.

    Other arguments stand in `must` in backquotes. The command line says flags for all of them.

    >>> error = ArgumentError("preset", "does not go with `masks`")
    >>> str(error), error.said_as("--{}".format)
    ('preset does not go with masks', '--preset does not go with --masks')
    """

    def __init__(self, name: str, must: str) -> None:
        self.name, self.must = name, must
        super().__init__(self.said_as(str))

    def said_as(self, word: Callable[[str], str]) -> str:
        """The sentence with other names for the arguments."""
        must = re.sub(r"`(\w+)`", lambda found: word(found[1]), self.must)
        return f"{word(self.name)}{'' if must.startswith(':') else ' '}{must}"


class JobError(RuntimeError):
    """Asked for rightly, but it could not be done: no network, a program that failed, a folder
    that somebody else works in (exit code 1)."""


def show(value: object, longest: int = 80) -> str:
    """A value as it is typed, and short."""
    try:
        return shorten(repr(value), longest)
    except ValueError:  # Python writes out no number of more than some thousand digits
        return "a number of thousands of digits"


def shorten(said: object, longest: int = LONGEST) -> str:
    """On one line, every letter of it printable, and no longer than `longest`: without its middle
    where it has to be. What a file holds can then neither fill a screen nor steer a terminal.

    >>> shorten("no\\x1b[2J\\n such file"), len(shorten("x" * 1000))
    ('no\\\\x1b[2J such file', 303)
    """
    text = " ".join(str(said).split())
    half = longest // 2
    if len(text) > longest:
        text = f"{text[:half]} … {text[-half:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
