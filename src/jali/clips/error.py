"""The errors of this package, each one sentence for people."""

from __future__ import annotations


class QualityError(ValueError):
    """A clip, a folder, a metric or a file of weights that cannot be used as asked."""


class QualityJobError(QualityError):
    """Asked for rightly, but it could not be done: no disk, no network, a program that failed."""
