"""`jali experiment status`: where experiments stand."""

from __future__ import annotations

from typing import Annotated

import typer

from jali.cli.experiment.errors import errors
from jali.cli.experiment.options import LOGS, RESULTS, AnyTags, Json, Logs, ResultsFolder
from jali.cli.experiment.progress import live
from jali.cli.experiment.tables import show_status

EXAMPLES = ("jali experiment status", "jali experiment status quick --watch 5")


def status(
    tags: AnyTags = None,
    watch: Annotated[
        float | None, typer.Option(min=0.2, help="Draw it again every N seconds, until all rest.")
    ] = None,
    results: ResultsFolder = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """Where experiments stand, from their own files and from Slurm."""
    import time

    from jali.experiments.results import Results
    from jali.experiments.status import find_tags, read_status

    with errors():
        place = Results(results, logs)
        names = find_tags(place, tags or [])
        rows = read_status(place, names)
        if watch is not None and not as_json:
            with live() as watched:
                while watched is not None:
                    watched(rows)
                    if not any(row.alive for row in rows):
                        break
                    time.sleep(watch)
                    rows = read_status(place, names)
    show_status(rows, as_json)
