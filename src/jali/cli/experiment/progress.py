"""What is seen while experiments run: log lines, a bar for each stage, the table that lives."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jali.cli.experiment.tables import status_table

if TYPE_CHECKING:
    from jali.experiments.status import Status


@contextmanager
def heard(*, quiet: bool) -> Iterator[None]:
    """What jali logs, on stderr. Only what matters where something else is on the screen."""
    log = logging.getLogger("jali")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.WARNING if quiet or sys.stderr.isatty() else logging.INFO)
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def bar(*, quiet: bool) -> Iterator[Callable[[str, int, int, str], None] | None]:
    """A bar for each stage, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from jali.experiments.team import speaks

    console = Console(stderr=True)
    if quiet or not console.is_terminal or not speaks():
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def told(stage: str, done: int, total: int, what: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, what=what)
            bar.update(tasks[stage], completed=done, total=total, what=what)

        yield told


@contextmanager
def live(*, quiet: bool = False) -> Iterator[Callable[[Sequence[Status]], None] | None]:
    """The table, drawn in place on a terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield (lambda rows: None) if not quiet else None  # noqa: ARG005
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda rows: live.update(status_table(rows), refresh=True)
