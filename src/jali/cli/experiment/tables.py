"""Where experiments stand and what came out, as tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from jali.experiments.status import Status

COLOURS = {
    "done": "green", "running": "cyan", "queued": "blue", "waiting": "dim", "failed": "red",
    "lost": "red", "damaged": "red", "cancelled": "yellow",
}  # fmt: skip


def say(text: str, *, quiet: bool = False) -> None:
    from rich.console import Console

    Console(stderr=quiet).print(text, highlight=False, markup=False, soft_wrap=True)


def show_status(rows: Sequence[Status], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    if not rows:
        say("no experiments here yet")
        return
    console.print(status_table(rows))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    say(", ".join(f"{count} {state}" for state, count in counts.items()))


def status_table(rows: Sequence[Status]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shared = _shared_start([row.tag for row in rows])
    table = Table(box=box.SIMPLE, padding=(0, 1), pad_edge=False, title_justify="left")
    table.title = f"{shared}…" if shared else None
    table.add_column("experiment", overflow="fold", min_width=14)
    for name in ("state", "stage", "", "time", "left", "tries", "job"):
        right = name in ("time", "left", "tries")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    if any(row.why for row in rows):
        table.add_column("", overflow="fold", min_width=12)
    for row in rows:
        colour = COLOURS[row.state]
        part = f" {row.done}/{row.total}" if row.total and row.state == "running" else ""
        table.add_row(
            escape(row.tag.removeprefix(shared)),
            f"[{colour}]{row.state}[/]",
            f"{row.stage or ''}{part}",
            _meter(row.share),
            clock(row.seconds),
            clock(row.seconds_left),
            str(max(row.attempts, row.submitted) or ""),
            row.job or "",
            *([escape(row.why)] if any(other.why for other in rows) else []),
        )
    return table


def _shared_start(tags: Sequence[str]) -> str:
    """What all tags of a sweep begin with: a table that repeats it has no room for the rest."""
    first, last = min(tags, default=""), max(tags, default="")
    same = next((i for i, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), 0)
    start, dash, _ = first[:same].rpartition("-")
    return start + dash


def _meter(share: float) -> str:
    full = round(6 * share)
    return f"{'━' * full}[dim]{'━' * (6 - full)}[/] {share:4.0%}"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def show_table(rows: Sequence[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    metrics = sorted({name for row in rows for name in row if name.endswith(".mean")})
    shared = _shared_start([row["tag"] for row in rows])
    table = Table(box=box.SIMPLE, padding=(0, 1), pad_edge=False, title_justify="left")
    table.title = f"{shared}…" if shared else None
    table.add_column("experiment", overflow="fold", min_width=12)
    table.add_column("variant", no_wrap=True)
    for name in ("asked", "cost", "dense s", "s", "speed-up", *(m.split(".")[1] for m in metrics)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        names = ("budget", "cost", "dense_seconds", "seconds", "speedup", *metrics)
        table.add_row(
            escape(row["tag"].removeprefix(shared)),
            escape(str(row["variant"])),
            *(_number(row.get(n)) for n in names),
        )
    Console().print(table)


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
