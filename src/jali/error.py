"""The two ways in which something does not work out, each told in one sentence for people."""

from __future__ import annotations


class InputError(ValueError):
    """What was given cannot be used as asked: it is the person's to change (exit code 2)."""


class JobError(RuntimeError):
    """Asked for rightly, but it could not be done: no network, a program that failed, a folder
    that somebody else works in (exit code 1)."""
