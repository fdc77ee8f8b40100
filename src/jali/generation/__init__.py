"""Run folders: the clips of one set of settings, and everything that was known when they were made.

`produce` makes or continues one, `read_run` opens one.
"""

from __future__ import annotations

from jali.generation.manifest import ClipRecord, RunFolder, RunFolderError, read_run
from jali.generation.produce import Tick, produce, produce_runs
from jali.generation.settings import Settings

__all__ = [
    "ClipRecord",
    "RunFolder",
    "RunFolderError",
    "Settings",
    "Tick",
    "produce",
    "produce_runs",
    "read_run",
]
