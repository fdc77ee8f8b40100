"""Where experiments stand and what came out, as tables for a terminal of any width and alphabet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from jali.cli.output import print_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from jali.experiments.collect import ResultTable
    from jali.experiments.status import Status

COLOURS = {
    "done": "green", "running": "cyan", "queued": "blue", "waiting": "dim", "failed": "red",
    "lost": "red", "damaged": "red", "cancelled": "yellow",
}  # fmt: skip
NARROW = 80  # below this many columns a row is a few lines of its own


def say(text: str, *, stderr: bool = False) -> None:
    from rich.console import Console

    Console(stderr=stderr).print(text, highlight=False, markup=False, soft_wrap=True)


def show_status(rows: Sequence[Status], as_json: bool) -> None:
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    from rich.console import Console

    console = Console()
    if not rows:
        say("no experiments here yet")
        return
    console.print(status_table(rows, console), highlight=False)
    say(", ".join(f"{count} {state}" for state, count in Counter(r.state for r in rows).items()))


def status_table(rows: Sequence[Status], console: Console) -> RenderableType:
    from rich.markup import escape

    lines = []
    for row in rows:
        colour = COLOURS[row.state]
        part = f" {row.done}/{row.total}" if row.total and row.state == "running" else ""
        lines.append({
            "experiment": escape(row.tag),
            "state": f"[{colour}]{row.state}[/]",
            "stage": f"{row.stage or ''}{part}",
            "done": _meter(row.share, console),
            ">time": clock(row.seconds),
            ">left": clock(row.seconds_left),
            ">tries": str(max(row.attempts, row.submitted) or ""),
            "job": row.job or "",
            "why": escape(row.why),
        })  # fmt: skip
    return _table(lines, console)


def show_table(table: ResultTable) -> None:
    """The collected rows: what was asked, what it cost, how fast it is and how close to dense."""
    from rich.console import Console
    from rich.markup import escape

    from jali.experiments.page import number

    console = Console()
    lines = []
    for row in table.rows:
        cells = {head: number(row.get(name)) for name, head in table.headings.items()}
        lines.append({
            head if head in ("experiment", "variant") else f">{head}": escape(
                cell.replace("–", "-") if console.options.ascii_only else cell
            )
            for head, cell in cells.items()
        })  # fmt: skip
    console.print(_table(lines, console), highlight=False)


def _table(lines: Sequence[dict[str, str]], console: Console) -> RenderableType:
    """Lines of named cells; the first names the experiment, and `>` is a number to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if console.width < NARROW:
        text = []
        for line in lines:
            cells = [f"{k.lstrip('>')} {v}" for k, v in line.items() if v and k != "experiment"]
            text.append("\n  ".join([line["experiment"], *_fold(cells, console.width - 2)]))
        return Text.from_markup("\n".join(text))
    shared = _shared_start([line["experiment"] for line in lines])
    table = Table(box=box.SIMPLE, padding=(0, 1), pad_edge=False, title_justify="left")
    table.title = f"{shared}{'...' if console.options.ascii_only else '…'}" if shared else None
    heads = [h for h in (lines[0] if lines else ()) if h != "why" or any(li[h] for li in lines)]
    for head in heads:
        free = head in ("experiment", "why")
        table.add_column(
            "" if head in ("done", "why") else head.lstrip(">"),
            justify="right" if head.startswith(">") else "left",
            no_wrap=not free, overflow="fold", min_width=12 if free else None,
        )  # fmt: skip
    for line in lines:
        named = line | {"experiment": line["experiment"].removeprefix(shared)}
        table.add_row(*(named[head] for head in heads))
    return table


def _fold(cells: Iterable[str], width: int) -> list[str]:
    """Cells side by side, as many in a line as there is room for."""
    from rich.text import Text

    lines: list[str] = []
    for cell in cells:
        longer = f"{lines[-1]}, {cell}" if lines else cell
        if lines and Text.from_markup(longer).cell_len <= width:
            lines[-1] = longer
        else:
            lines.append(cell)
    return lines


def _shared_start(tags: Sequence[str]) -> str:
    """What all tags of a sweep begin with: a table that repeats it has no room for the rest."""
    first, last = min(tags, default=""), max(tags, default="")
    same = next((i for i, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), 0)
    start, dash, _ = first[:same].rpartition("-")
    return start + dash


def _meter(share: float, console: Console) -> str:
    full = round(6 * share)
    if console.options.ascii_only or console.width < NARROW:
        return f"{share:4.0%}".strip()
    return f"{'━' * full}[dim]{'━' * (6 - full)}[/] {share:4.0%}"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
