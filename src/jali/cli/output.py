"""What commands print: JSON, tables, bars, and numbers that may be missing."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from jali.generation import Tick

Tell = Callable[..., None]  # what is done and, where that changes, how much of how much


# For terminals without them; any other sign becomes a question mark.
PLAIN_SIGNS = {
    "×": "x", "–": "-", "−": "-", "…": "...", "“": '"', "”": '"', "‖": "|", "●": "*", "·": ".",
    "▶": ">", "─": "-", "━": "-", "░": ".", "▒": ":", "▓": "*", "█": "#",
}  # fmt: skip


def write_any_sign() -> None:
    """From now on a sign that the terminal cannot show is a plainer one, and not an error."""
    codecs.register_error("plain_signs", _write_plainly)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain_signs")


def _write_plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(PLAIN_SIGNS.get(sign, "?") for sign in signs), error.end


def print_json(value: Any, **how: Any) -> None:
    """On stdout, and nothing else there; `how` is for json.dumps."""
    text = json.dumps(value, ensure_ascii=False, **how)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # JSON has its own way to write them
        text = json.dumps(value, **how)
    typer.echo(text)


def say(text: Any, **how: Any) -> None:
    """A line or a table as it is: nothing in it is markup or highlighted."""
    from rich.console import Console

    Console().print(text, highlight=False, markup=False, **how)


def make_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    dim: Callable[[Sequence[str]], bool] = lambda _: False,
    left: int = 1,
    wrap_last: bool = False,
    **more: Any,
) -> Table:
    """Rows of text under headings: the first `left` columns begin on the left, the others end on
    the right. `dim` tells the rows that matter less, `wrap_last` lets the last column have several
    lines; `more` is rich's (title, caption, padding)."""
    from rich import box
    from rich.table import Table

    more = {"title_justify": "left", "caption_justify": "left", "padding": (0, 1, 0, 0)} | more
    table = Table(box=box.SIMPLE, **more)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", no_wrap=True)
    if wrap_last:
        table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for row in rows:
        table.add_row(*row, style="dim" if dim(row) else "")
    return table


def number(value: float | None, how: str) -> str:
    """Nothing where there is no value."""
    return "" if value is None else format(value, how)


def can_draw() -> bool:
    """Whether there can be a picture; says so where there cannot."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is not None:
        return True
    typer.echo("jali: no picture without matplotlib: pip install 'jali[report]'", err=True)
    return False


@contextmanager
def progress_bar(quiet: bool, log: bool = False) -> Iterator[Tell]:
    """A bar on stderr, with the time that is left; a log file gets none, or with `log` a line for
    everything that begins."""
    if quiet:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task, last = bar.add_task("loading", total=1), ""

        def tell(words: str, done: int | None = None, total: int | None = None) -> None:
            nonlocal last
            bar.update(task, description=words, completed=done, total=total)
            if log and bar.disable and words != last:
                typer.echo(words, err=True)
            last = words

        yield tell


def tell_clips(tell: Tell) -> Callable[[str, Tick], None]:
    """Where a run stands, for the bar."""

    def progress(run: str, tick: Tick) -> None:
        words = tick.prompt if len(tick.prompt) < 40 else f"{tick.prompt[:39]}…"
        done = tick.clip * tick.steps + tick.step
        tell(f"{run}, clip {tick.clip + 1} of {tick.clips}: {words}", done, tick.clips * tick.steps)

    return progress
