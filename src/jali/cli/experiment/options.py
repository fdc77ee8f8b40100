"""What the commands share: options, and how they end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from jali.cli.completion import words
from jali.cli.exits import INTERRUPTED, fail, job_errors, refuse
from jali.cli.options import PLACE, Json

JOB = "Each job"
NamedTags = Annotated[list[str], typer.Argument(help="Tags of experiments, or names of sweeps.")]
AnyTags = Annotated[
    list[str] | None,
    typer.Argument(help="Tags of experiments, or names of sweeps.", show_default=False),
]
MaxParallel = Annotated[int | None, typer.Option(min=1, help="Jobs at a time.", show_default=False)]


def _check_track(track: str | None) -> str | None:
    if track is not None:
        from jali.experiments.track import check_tracker

        with end_in_words():
            check_tracker(track)
    return track


def _check_on(on: str | None) -> str | None:
    if on not in (None, "local", "slurm"):
        refuse(f"--on is local or slurm, got {on!r}")
    return on


On = Annotated[
    str,
    typer.Option(
        help="local or slurm.", callback=_check_on, autocompletion=words("local", "slurm")
    ),
]
OnAgain = Annotated[
    str | None,
    typer.Option(
        help="local or slurm.",
        show_default="as before",
        callback=_check_on,
        autocompletion=words("local", "slurm"),
    ),
]
Track = Annotated[
    str | None,
    typer.Option(
        help="Rows also go to trackio or wandb.", rich_help_panel=PLACE, callback=_check_track
    ),
]


def with_results(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --results, --logs-dir and --json, and hand it `results` and `as_json`.

    Whatever it raises ends it in one sentence.
    """

    def shared(
        results: Annotated[
            Path, typer.Option(help="Folder of all results.", rich_help_panel=PLACE)
        ] = Path("results"),
        # Not --logs: torchrun takes that for an option of its own, cut short.
        logs_dir: Annotated[
            Path, typer.Option(help="Folder of all logs.", rich_help_panel=PLACE)
        ] = Path("experiments/logs"),
        as_json: Json = False,
    ) -> None: ...

    names = command.__globals__ | {"Results": Path}  # which a command imports late
    own = inspect.signature(command, globals=names, eval_str=True).parameters
    last = inspect.signature(shared, eval_str=True).parameters
    options = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in (*(p for p in own.values() if p.name not in last), *last.values())
    ]

    @functools.wraps(command)
    def run(*, results: Path, logs_dir: Path, **given: Any) -> None:
        from jali.experiments.results import Results

        with end_in_words():
            command(results=Results(results, logs_dir), **given)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in options}
    return run


@contextmanager
def end_in_words() -> Iterator[None]:
    """One sentence each: 2 for what was asked, 1 for what went wrong, 130 for Ctrl-C."""
    from jali.experiments.job import Stopped, sentence
    from jali.files import UnreadableError

    try:
        with job_errors():
            try:
                yield
            except FileNotFoundError as error:  # what was named is not there
                refuse(sentence(error))
            except (UnreadableError, OSError) as error:
                fail(sentence(error))
    except Stopped as error:
        typer.echo(f"jali: {error}", err=True)
        raise typer.Exit(INTERRUPTED) from None
