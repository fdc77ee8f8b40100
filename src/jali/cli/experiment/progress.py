"""What is seen while experiments run: log lines, a bar for each stage, the table that lives."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from jali.cli.experiment.table import status_table

if TYPE_CHECKING:
    from jali.experiments.status import Status


def print_log(*, quiet: bool) -> AbstractContextManager[None]:
    """What jali logs, on stderr. Only what matters where something else is on the screen."""
    from jali.experiments.job import log_to

    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING if quiet or sys.stderr.isatty() else logging.INFO)
    return log_to(handler)


@contextmanager
def show_bars(*, quiet: bool) -> Iterator[Callable[[str, int, int, str], None] | None]:
    """A bar for each stage, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from jali.experiments.job import is_first_rank

    console = Console(stderr=True)
    if quiet or not console.is_terminal or not is_first_rank():
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(stage: str, done: int, total: int, what: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, what=what)
            bars.update(tasks[stage], completed=done, total=total, what=what)

        yield on_progress


@contextmanager
def show_live(*, quiet: bool = False) -> Iterator[Callable[[Sequence[Status]], None] | None]:
    """The table, drawn in place on a terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None if quiet else lambda rows: None  # noqa: ARG005
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda rows: live.update(status_table(rows, console), refresh=True)
