"""`jali experiment cancel`: stop what waits or runs."""

from __future__ import annotations

import json

import typer

from jali.cli.experiment.errors import errors
from jali.cli.experiment.options import LOGS, RESULTS, Json, Logs, NamedTags, ResultsFolder

EXAMPLES = ("jali experiment cancel quick",)


def cancel(
    tags: NamedTags,
    results: ResultsFolder = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """Stop what waits or runs. What is complete is kept, and a retry goes on from there."""
    from jali.experiments.launch import cancel as cancelled
    from jali.experiments.results import Results
    from jali.experiments.status import find_tags

    with errors():
        place = Results(results, logs)
        stopped = cancelled(place, find_tags(place, tags))
    if as_json:
        typer.echo(json.dumps({"cancelled": stopped}))
    else:
        typer.echo(f"cancelled: {', '.join(stopped) or 'nothing was waiting or running'}")
