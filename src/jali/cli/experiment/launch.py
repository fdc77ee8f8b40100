"""`jali experiment launch`: a sweep, on this machine or on Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli.exits import fail, refuse
from jali.cli.experiment.errors import errors
from jali.cli.experiment.options import (
    JOB,
    LOGS,
    RESULTS,
    Json,
    Logs,
    ResultsFolder,
    Track,
    check_track,
)
from jali.cli.experiment.progress import heard, live
from jali.cli.experiment.tables import clock, say, show_status

if TYPE_CHECKING:
    from jali.experiments.cluster import Cluster
    from jali.experiments.results import Results
    from jali.experiments.sweep import Sweep

EXAMPLES = (
    "jali experiment launch experiments/sweeps/quick.yaml --on local --max-parallel 2",
    "jali experiment launch experiments/sweeps/paper.yaml --on slurm --dry-run",
    "jali experiment launch mine.yaml --on slurm --partition gpu --time 12:00:00 --wait",
)


def launch(
    sweep: Annotated[Path, typer.Argument(help="A YAML file; see docs/experiments.md.")],
    on: Annotated[str, typer.Option(help="local or slurm.")] = "local",
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Jobs at a time.", show_default=False)
    ] = None,
    partition: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    time: Annotated[
        str | None, typer.Option(help="[default: 6:00:00]", rich_help_panel=JOB, show_default=False)
    ] = None,
    mem: Annotated[
        str | None, typer.Option(help="[default: 64GB]", rich_help_panel=JOB, show_default=False)
    ] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option(help="[default: 8]", rich_help_panel=JOB, show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="[default: 1]", rich_help_panel=JOB, show_default=False)
    ] = None,
    account: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    qos: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    constraint: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Stay and watch on Slurm too; failed jobs are tried again."),
    ] = False,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="How often one experiment may be started.")
    ] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all, say what would be done, do nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Redo what differs under these tags.")
    ] = False,
    results: ResultsFolder = RESULTS,
    logs: Logs = LOGS,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run every experiment of a sweep that is not done, on this machine or as a Slurm array.

    On this machine it stays until all are done, and Ctrl-C ends them. On Slurm it submits and
    leaves, unless --wait.
    """
    from dataclasses import replace

    from jali.experiments.cluster import cluster_for
    from jali.experiments.launch import launch as launched
    from jali.experiments.resources import Resources
    from jali.experiments.results import Results
    from jali.experiments.stages import all_stages
    from jali.experiments.sweep import read_sweep

    with errors():
        if on not in ("local", "slurm"):
            refuse(f"--on is local or slurm, got {on!r}")
        check_track(track)
        found = read_sweep(sweep)
        given = {
            "partition": partition, "time": time, "mem": mem, "cpus_per_task": cpus_per_task,
            "gpus": gpus, "account": account, "qos": qos, "constraint": constraint,
        }  # fmt: skip
        asked = found.resources.to_dict() | {k: v for k, v in given.items() if v is not None}
        found = replace(found, resources=Resources.from_dict(asked))
        place = Results(results, logs)
        cluster = cluster_for(
            on, found.resources, place.sweep(found.name), found.name, max_parallel
        )
        if dry_run:
            _dry_run(found, place, cluster, as_json)
            return
        with heard(quiet=as_json), live(quiet=as_json) as watched:
            rows = launched(
                found, place, cluster, all_stages, wait=wait or on == "local",
                overwrite=overwrite, track=track, max_attempts=max_attempts, watched=watched,
                every=1.0 if on == "local" else 5.0,
            )  # fmt: skip
    show_status(rows, as_json)
    if on == "slurm" and not wait:
        say(f"Submitted. See: jali experiment status {found.name}", quiet=as_json)
    elif any(row.state != "done" for row in rows):
        count = sum(row.state != "done" for row in rows)
        fail(f"{count} of {len(rows)} experiments are not done; see their logs in {place.logs}")


def _dry_run(sweep: Sweep, place: Results, cluster: Cluster, as_json: bool) -> None:
    """What would be submitted, and what it would cost."""
    from jali.experiments.cluster import OnSlurm
    from jali.experiments.scale import forecast

    found = [(experiment, forecast(experiment)) for experiment in sweep.experiments]
    hours = sum(f.seconds for _, f in found if f is not None) / 3600
    size = sum(f.bytes for _, f in found if f is not None) / 2**30
    script = cluster.script(len(found)) if isinstance(cluster, OnSlurm) else None
    if as_json:
        facts = {
            "sweep": sweep.name, "on": cluster.where, "resources": sweep.resources.to_dict(),
            "experiments": [experiment.to_dict() for experiment in sweep.experiments],
            "script": script, "h200_hours": round(hours, 2), "gib": round(size, 2),
        }  # fmt: skip
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    for experiment, cost in found:
        known = "" if cost is None else f"  {cost.tokens:,} tokens, {clock(cost.seconds)} on H200"
        done = "  (done)" if place.speed(experiment.tag).exists() else ""
        say(f"{experiment.tag}{known}{done}")
    say(
        f"{len(found)} experiments, about {hours:.1f} hours of one H200 without loading and "
        f"decoding, about {size:.1f} GiB on disk. Nothing was submitted."
    )
    if script is not None:
        say(script)
