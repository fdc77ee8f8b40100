"""The one error of this package: folders that cannot be compared, said in one sentence."""

from __future__ import annotations


class ReportError(ValueError):
    """A folder, a file in it, or an output that cannot be used as asked."""
