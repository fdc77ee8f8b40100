"""Hand experiments to a cluster, watch them, and try again what failed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from jali.experiments import ledger
from jali.experiments.cluster import Cluster, LaunchError
from jali.experiments.experiment import Experiment
from jali.experiments.job import OtherSettingsError, Task, read_config, write_config
from jali.experiments.lock import HeldError, holder, locked, stale
from jali.experiments.owner import me
from jali.experiments.resources import Resources
from jali.experiments.results import Results
from jali.experiments.slurm import job_ended, scancel, slurm_is_here
from jali.experiments.stage import Stage
from jali.experiments.status import AGAIN, Slurm, Status, read_status
from jali.experiments.storage import write_json
from jali.experiments.sweep import Sweep

log = logging.getLogger("jali")
MAX_ATTEMPTS = 3
Watched = Callable[[Sequence[Status]], None]


def launch(
    sweep: Sweep,
    results: Results,
    cluster: Cluster,
    stages: Callable[[], Sequence[Stage]],
    *,
    wait: bool = True,
    overwrite: bool = False,
    track: str | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    watched: Watched | None = None,
    every: float = 2.0,
) -> list[Status]:
    """Submit what is not done, and with `wait` stay until nothing is left to wait for.

    Failed and lost jobs are submitted again, up to `max_attempts` times in all; cancelled ones
    are not. A sweep that is being launched, or has jobs that wait or run, is refused.
    """
    folder = results.sweep(sweep.name)
    with locked(folder / "lock.json", f"the sweep {sweep.name}"):
        _check_ranks(sweep.experiments, sweep.resources)
        before = prepare(sweep, results, overwrite=overwrite)
        todo = [e for e in sweep.experiments if before[e.tag].state != "done" or overwrite]
        for tag in (e.tag for e in todo):
            results.cancelled(tag).unlink(missing_ok=True)
        tasks = [Task(e, results, stages, overwrite, track) for e in todo]
        with _stopping(cluster):
            if not wait:
                cluster.submit(tasks)
            else:
                watch(results, sweep.tags, cluster, tasks, max_attempts, watched, every)
    return read_status(results, sweep.tags)


def prepare(sweep: Sweep, results: Results, *, overwrite: bool = False) -> dict[str, Status]:
    """Refuse what cannot be launched, before anything is; then write down the sweep."""
    slurm = Slurm.asked() if slurm_is_here() else Slurm({})
    known = [tag for tag in sweep.tags if results.config(tag).exists()]
    before = {row.tag: row for row in read_status(results, known, slurm)}
    busy = [row for row in before.values() if row.alive]
    if busy:
        raise LaunchError(
            f"{len(busy)} of the {len(sweep.tags)} experiments of {sweep.name} are still "
            f"{busy[0].state}, first {busy[0].tag}{_by(results, busy[0])}; see jali experiment "
            f"status {sweep.name}, or cancel them"
        )
    for experiment in sweep.experiments:
        held = results.lock(experiment.tag)
        if held.exists() and not stale(held, job_ended):
            raise HeldError(f"the experiment {experiment.tag}", holder(held), "it began", held)
        if experiment.tag in before and not overwrite:
            differ = experiment.differences(read_config(results, experiment.tag))
            if differ:
                raise OtherSettingsError(
                    f"{results.folder(experiment.tag)} holds an experiment with other settings "
                    f"({'; '.join(differ)}); rename the sweep, or give --overwrite"
                )
    for experiment in sweep.experiments:
        write_config(experiment, results, overwrite=overwrite)
        before.setdefault(experiment.tag, Status(experiment.tag, "waiting"))
    facts = {"kind": "jali-sweep", "version": 1, "name": sweep.name, "tags": list(sweep.tags)}
    write_json(results.sweep_file(sweep.name), facts | {"resources": sweep.resources.to_dict()})
    return before


def watch(
    results: Results,
    tags: Sequence[str],
    cluster: Cluster,
    tasks: Sequence[Task],
    max_attempts: int,
    watched: Watched | None,
    every: float,
) -> None:
    """Submit, and stay until every tag is done, cancelled, or has failed too often."""
    by_tag = {task.experiment.tag: task for task in tasks}
    before = {tag: len(ledger.submissions(results, tag)) for tag in by_tag}
    cluster.submit(tasks)
    while True:
        cluster.tick()
        slurm = Slurm.asked() if cluster.where == "slurm" else Slurm({})
        rows = read_status(results, tags, slurm)
        if watched is not None:
            watched(rows)
        ours = [row for row in rows if row.tag in by_tag]
        again = []
        if not slurm.silent:  # else nobody knows, and nothing is done twice
            for row in ours:
                tries = row.submitted - before[row.tag]
                if row.state in AGAIN and not cluster.holds(row.tag) and tries < max_attempts:
                    log.warning("%s: %s (%s); trying again", row.tag, row.state, row.why)
                    again.append(by_tag[row.tag])
        cluster.submit(again)
        busy = [r for r in ours if r.alive or cluster.holds(r.tag)]
        if not busy and not again and not slurm.silent:
            return
        time.sleep(every)


def retry(
    results: Results,
    tags: Sequence[str],
    make_cluster: Callable[[str, Resources], Cluster],
    stages: Callable[[], Sequence[Stage]],
    *,
    on: str | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    wait: bool = False,
    track: str | None = None,
    watched: Watched | None = None,
    every: float = 2.0,
) -> tuple[list[str], list[str]]:
    """Submit again what failed, was lost, damaged, cancelled or never begun.

    Returns (tags submitted, tags that have been tried `max_attempts` times already). Each goes
    where it was before, with the same resources, unless `on` says otherwise.
    """
    groups: dict[tuple[str, Resources], list[Task]] = {}
    spent = []
    for row in read_status(results, tags):
        if row.alive or row.state == "done":
            continue
        sent = ledger.submissions(results, row.tag)
        if len(sent) >= max_attempts:
            spent.append(row.tag)
            continue
        where = on or (sent[-1].on if sent else "local")
        resources = sent[-1].resources if sent else Resources()
        task = Task(read_config(results, row.tag), results, stages, track=track)
        groups.setdefault((where, resources), []).append(task)
    submitted = [task.experiment.tag for tasks in groups.values() for task in tasks]
    with locked(results.root / "_sweeps" / "retry.lock.json", "a retry"):
        for (where, resources), tasks in groups.items():
            cluster = make_cluster(where, resources)
            for task in tasks:
                results.cancelled(task.experiment.tag).unlink(missing_ok=True)
            with _stopping(cluster):
                if not wait and where == "slurm":
                    cluster.submit(tasks)
                else:
                    own = [task.experiment.tag for task in tasks]
                    watch(results, own, cluster, tasks, 1, watched, every)
    return submitted, spent


def cancel(results: Results, tags: Sequence[str]) -> list[str]:
    """Stop what waits or runs; returns those tags. What they have done so far is kept."""
    stopped, numbers = [], []
    for row in read_status(results, tags):
        if row.state not in ("queued", "running", "waiting"):
            continue
        write_json(
            results.cancelled(row.tag),
            {"kind": "jali-cancelled", "version": 1, "owner": me().to_dict()},
        )
        stopped.append(row.tag)
        sent = ledger.submissions(results, row.tag)
        if sent and sent[-1].on == "slurm" and row.alive:
            numbers.append(sent[-1].job)
        elif (owner := holder(results.lock(row.tag))) is not None and owner.alive():
            if owner.job is not None:
                numbers.append(owner.job)
            else:
                os.kill(owner.pid, signal.SIGTERM)
        elif sent and sent[-1].on == "local" and sent[-1].owner.alive():
            os.kill(sent[-1].owner.pid, signal.SIGTERM)  # it has not begun yet
    scancel(numbers)
    return stopped


@contextlib.contextmanager
def _stopping(cluster: Cluster) -> Iterator[None]:
    """Ctrl-C, or any other way out, ends what runs only here."""
    try:
        yield
    except BaseException:
        cluster.stop()
        raise


def _check_ranks(experiments: Sequence[Experiment], resources: Resources) -> None:
    for experiment in experiments:
        if experiment.ranks > max(1, resources.gpus):
            raise ValueError(
                f"{experiment.tag} runs on {experiment.ranks} ranks, but a job gets "
                f"{resources.gpus} GPUs; give --gpus {experiment.ranks}"
            )


def _by(results: Results, row: Status) -> str:
    try:
        owner = holder(results.lock(row.tag))
    except ValueError:
        owner = None
    if owner is not None:
        return f" by {owner}"
    sent = ledger.submissions(results, row.tag)
    return f" as job {row.job}, submitted by {sent[-1].owner.user}" if sent else ""
