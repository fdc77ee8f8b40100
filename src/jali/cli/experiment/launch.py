"""`jali experiment launch`, `retry` and `cancel`: sweeps, on this machine or on Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import fail
from jali.cli.experiment.options import (
    JOB,
    MaxParallel,
    NamedTags,
    On,
    OnAgain,
    Track,
    with_results,
)
from jali.cli.experiment.progress import print_log, show_live
from jali.cli.experiment.table import clock, say, show_status
from jali.cli.output import print_json

if TYPE_CHECKING:
    from jali.experiments.cluster import Cluster
    from jali.experiments.resources import Resources
    from jali.experiments.results import Results
    from jali.experiments.sweep import Sweep


def _resource(usual: str | None = None) -> Any:
    return typer.Option(rich_help_panel=JOB, show_default=usual or False)


@with_results
def launch(
    results: Results,
    as_json: bool,
    sweep: Annotated[Path, typer.Argument(help="A YAML file; see docs/experiments.md.")],
    on: On = "local",
    max_parallel: MaxParallel = None,
    partition: Annotated[str | None, _resource()] = None,
    time: Annotated[str | None, _resource("6:00:00")] = None,
    mem: Annotated[str | None, _resource("64GB")] = None,
    cpus_per_task: Annotated[int | None, _resource("8")] = None,
    gpus: Annotated[int | None, _resource("1")] = None,
    account: Annotated[str | None, _resource()] = None,
    qos: Annotated[str | None, _resource()] = None,
    constraint: Annotated[str | None, _resource()] = None,
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
    track: Track = None,
) -> None:
    """Run every experiment of a sweep that is not done, on this machine or as a Slurm array.

    On this machine it stays until all are done, and Ctrl-C ends them. On Slurm it submits and
    leaves, unless --wait.
    """
    from jali.experiments.cluster import open_cluster
    from jali.experiments.launch import launch as start
    from jali.experiments.stages import all_stages
    from jali.experiments.sweep import read_sweep

    found = read_sweep(sweep)
    asked: dict[str, Any] = {
        "partition": partition, "time": time, "mem": mem, "cpus_per_task": cpus_per_task,
        "gpus": gpus, "account": account, "qos": qos, "constraint": constraint,
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    resources = replace(found.resources, **given)
    found = replace(found, resources=resources)
    cluster = open_cluster(on, resources, results.sweep(found.name), found.name, max_parallel)
    if dry_run:
        _dry_run(found, results, cluster, as_json)
        return
    with print_log(quiet=as_json), show_live(quiet=as_json) as on_status:
        rows = start(
            found, results, cluster, all_stages, wait=wait or on == "local", overwrite=overwrite,
            track=track, max_attempts=max_attempts, on_status=on_status,
            every=1.0 if on == "local" else 5.0,
        )  # fmt: skip
    show_status(rows, as_json)
    count = sum(row.state != "done" for row in rows)
    if on == "slurm" and not wait:
        say(f"Submitted. See: jali experiment status {found.name}", stderr=as_json)
    elif count:
        fail(f"{count} of {len(rows)} experiments are not done; see their logs in {results.logs}")


def _dry_run(sweep: Sweep, results: Results, cluster: Cluster, as_json: bool) -> None:
    """What would be submitted, and what it would cost."""
    from jali.experiments.cluster import SlurmCluster
    from jali.experiments.scale import forecast

    costs = [forecast(experiment) for experiment in sweep.experiments]
    hours = sum(cost.seconds for cost in costs if cost) / 3600
    size = sum(cost.bytes for cost in costs if cost) / 2**30
    script = cluster.script(len(costs)) if isinstance(cluster, SlurmCluster) else None
    if as_json:
        facts = {
            "sweep": sweep.name, "on": cluster.where, "resources": sweep.resources.to_dict(),
            "experiments": [experiment.to_dict() for experiment in sweep.experiments],
            "script": script, "h200_hours": round(hours, 2), "gib": round(size, 2),
        }  # fmt: skip
        print_json(facts)
        return
    for experiment, cost in zip(sweep.experiments, costs, strict=True):
        known = "" if cost is None else f"  {cost.tokens:,} tokens, {clock(cost.seconds)} on H200"
        done = "  (done)" if results.speed(experiment.tag).exists() else ""
        say(f"{experiment.tag}{known}{done}")
    say(
        f"{len(costs)} experiments, about {hours:.1f} hours of one H200 without loading and "
        f"decoding, about {size:.1f} GiB on disk. Nothing was submitted."
    )
    if script is not None:
        say(script)


@with_results
def retry(
    results: Results,
    as_json: bool,
    tags: NamedTags,
    on: OnAgain = None,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="How often one experiment may be submitted in all.")
    ] = 3,
    max_parallel: MaxParallel = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay and watch on Slurm too.")] = False,
    track: Track = None,
) -> None:
    """Submit again what failed, was pre-empted, lost, damaged or cancelled; the rest stays."""
    from jali.experiments.cluster import open_cluster
    from jali.experiments.launch import retry as start
    from jali.experiments.stages import all_stages
    from jali.experiments.status import read_status

    def cluster(where: str, resources: Resources) -> Cluster:
        return open_cluster(where, resources, results.root / "_sweeps", "retry", max_parallel)

    names = results.find_tags(tags)
    with print_log(quiet=as_json), show_live(quiet=as_json) as on_status:
        submitted, spent = start(
            results, names, cluster, all_stages, on=on, max_attempts=max_attempts, wait=wait,
            track=track, on_status=on_status,
        )  # fmt: skip
    if as_json:
        print_json({"submitted": submitted, "spent": spent})
    else:
        say(f"submitted again: {', '.join(submitted) or 'nothing needed it'}")
        show_status(read_status(results, names), as_json)
    if spent:
        fail(
            f"{', '.join(spent)}: submitted {max_attempts} times already; read the log "
            f"(jali experiment logs {spent[0]}), or raise --max-attempts"
        )


@with_results
def cancel(results: Results, as_json: bool, tags: NamedTags) -> None:
    """Stop what waits or runs. What is complete is kept, and a retry goes on from there."""
    from jali.experiments.launch import cancel as stop

    stopped = stop(results, results.find_tags(tags))
    if as_json:
        print_json({"cancelled": stopped})
    else:
        say(f"cancelled: {', '.join(stopped) or 'nothing was waiting or running'}")
