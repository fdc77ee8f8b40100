"""`jali experiment collect`: all results in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jali.cli.exits import fail
from jali.cli.experiment.errors import errors
from jali.cli.experiment.options import LOGS, RESULTS, AnyTags, Json, Logs, ResultsFolder
from jali.cli.experiment.tables import say, show_table

EXAMPLES = ("jali experiment collect quick", "jali experiment collect a b --output tables")


def collect(
    tags: AnyTags = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for table.csv, .json and .html.", show_default=False),
    ] = None,
    results: ResultsFolder = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """All results in one table: CSV, JSON, and a page with quality over speed-up.

    The same result files always give the same bytes.
    """
    from jali.experiments.collect import collect as collected
    from jali.experiments.collect import write
    from jali.experiments.results import Results
    from jali.experiments.status import find_tags

    with errors():
        place = Results(results, logs)
        table = collected(place, find_tags(place, tags or []))
        paths = [] if as_json and output is None else write(table, output or place.root)
    if as_json:
        typer.echo(table.to_json(), nl=False)
    else:
        show_table(table.rows)
        say("Written: " + ", ".join(map(str, paths)))
    if table.left_out:
        told = "; ".join(f"{tag}: {why}" for tag, why in table.left_out.items())
        fail(f"{len(table.left_out)} experiments are left out: {told}")
