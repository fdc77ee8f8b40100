"""`jali experiment retry`: submit again what did not come to its end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli.exits import fail, refuse
from jali.cli.experiment.errors import errors
from jali.cli.experiment.options import (
    LOGS,
    RESULTS,
    Json,
    Logs,
    NamedTags,
    ResultsFolder,
    Track,
    check_track,
)
from jali.cli.experiment.progress import heard, live
from jali.cli.experiment.tables import say, show_status

if TYPE_CHECKING:
    from jali.experiments.cluster import Cluster
    from jali.experiments.resources import Resources

EXAMPLES = ("jali experiment retry quick", "jali experiment retry a b --on local")


def retry(
    tags: NamedTags,
    on: Annotated[
        str | None, typer.Option(help="local or slurm. [default: as before]", show_default=False)
    ] = None,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="How often one experiment may be submitted in all.")
    ] = 3,
    max_parallel: Annotated[int | None, typer.Option(min=1, help="Jobs at a time.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay and watch on Slurm too.")] = False,
    results: ResultsFolder = RESULTS,
    logs: Logs = LOGS,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Submit again what failed, was pre-empted, lost, damaged or cancelled; the rest stays."""
    from jali.experiments.cluster import cluster_for
    from jali.experiments.launch import retry as retried
    from jali.experiments.results import Results
    from jali.experiments.stages import all_stages
    from jali.experiments.status import find_tags, read_status

    with errors():
        if on not in (None, "local", "slurm"):
            refuse(f"--on is local or slurm, got {on!r}")
        check_track(track)
        place = Results(results, logs)
        names = find_tags(place, tags)

        def cluster(where: str, resources: Resources) -> Cluster:
            return cluster_for(where, resources, place.root / "_sweeps", "retry", max_parallel)

        with heard(quiet=as_json), live(quiet=as_json) as watched:
            submitted, spent = retried(
                place, names, cluster, all_stages, on=on, max_attempts=max_attempts, wait=wait,
                track=track, watched=watched,
            )  # fmt: skip
        rows = read_status(place, names)
    if as_json:
        typer.echo(json.dumps({"submitted": submitted, "spent": spent}))
    else:
        say(f"submitted again: {', '.join(submitted) or 'nothing needed it'}")
        show_status(rows, as_json)
    if spent:
        fail(
            f"{', '.join(spent)}: submitted {max_attempts} times already; read the log "
            f"(jali experiment logs {spent[0]}), or raise --max-attempts"
        )
