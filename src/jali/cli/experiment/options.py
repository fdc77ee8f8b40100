"""Options that several of the commands take, and the panels of their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jali.cli.options import PLACE

JOB = "Each job"
RESULTS, LOGS = Path("results"), Path("experiments/logs")

ResultsFolder = Annotated[Path, typer.Option(help="Folder of all results.", rich_help_panel=PLACE)]
# Not --logs: torchrun takes that for an option of its own, cut short.
Logs = Annotated[
    Path, typer.Option("--logs-dir", help="Folder of all logs.", rich_help_panel=PLACE)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
NamedTags = Annotated[list[str], typer.Argument(help="Tags of experiments, or names of sweeps.")]
AnyTags = Annotated[
    list[str] | None,
    typer.Argument(help="Tags of experiments, or names of sweeps.", show_default=False),
]
Track = Annotated[
    str | None,
    typer.Option(help="Rows also go to trackio or wandb.", rich_help_panel=PLACE),
]


def check_track(track: str | None) -> None:
    if track is not None:
        from jali.experiments.track import check_tracker

        check_tracker(track)
