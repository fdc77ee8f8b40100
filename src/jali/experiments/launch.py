"""Hand experiments to a cluster, watch them, and try again what failed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from jali.experiments.cluster import Cluster, LaunchError
from jali.experiments.job import Job, is_written, read_config, write_config
from jali.experiments.lock import check_free, hold, holder, me
from jali.experiments.resources import Resources
from jali.experiments.results import Results
from jali.experiments.slurm import SlurmAnswer, ask_slurm, cancel_jobs, job_ended, slurm_is_here
from jali.experiments.stage import Stage
from jali.experiments.status import AGAIN, Status, read_status
from jali.experiments.submission import last_submission, read_submissions
from jali.experiments.sweep import Sweep
from jali.files import write_json

log = logging.getLogger("jali")
MAX_ATTEMPTS = 3
OnStatus = Callable[[Sequence[Status]], None]


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
    on_status: OnStatus | None = None,
    every: float = 2.0,
) -> list[Status]:
    """Submit what is not done, and with `wait` stay until nothing is left to wait for.

    Failed and lost jobs are submitted again, up to `max_attempts` times in all; cancelled ones
    are not. A sweep that is being launched, or has jobs that wait or run, is refused: `HeldError`
    or `LaunchError`.
    """
    with hold(results.sweep(sweep.name) / "lock.json", f"the sweep {sweep.name}"):
        done = _prepare(sweep, results, overwrite=overwrite)
        jobs = [
            Job(experiment, results, stages, overwrite, track)
            for experiment in sweep.experiments
            if overwrite or experiment.tag not in done
        ]
        _submit(cluster, jobs, wait, max_attempts, on_status, every, among=sweep.tags)
    return read_status(results, sweep.tags)


def retry(
    results: Results,
    tags: Sequence[str],
    open_cluster: Callable[[str, Resources], Cluster],
    stages: Callable[[], Sequence[Stage]],
    *,
    on: str | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    wait: bool = False,
    track: str | None = None,
    on_status: OnStatus | None = None,
    every: float = 2.0,
) -> tuple[list[str], list[str]]:
    """Submit again what failed, was lost, damaged, cancelled or never begun.

    Returns (tags submitted, tags that have been tried `max_attempts` times already). Each goes
    where it was before, with the same resources, unless `on` says otherwise.
    """
    groups: dict[tuple[str, Resources], list[Job]] = {}
    spent = []
    for row in read_status(results, tags):
        if row.alive or row.state == "done":
            continue
        if row.submitted >= max_attempts:
            spent.append(row.tag)
            continue
        last = last_submission(results, row.tag)
        where = on or ("local" if last is None else last.on)
        job = Job(read_config(results.config(row.tag)), results, stages, track=track)
        key = where, Resources() if last is None else last.resources
        groups.setdefault(key, []).append(job)
    with hold(results.root / "_sweeps" / "retry.lock.json", "a retry"):
        for (where, resources), jobs in groups.items():
            stay = wait or where == "local"
            _submit(open_cluster(where, resources), jobs, stay, 1, on_status, every)
    return [job.tag for jobs in groups.values() for job in jobs], spent


def cancel(results: Results, tags: Sequence[str]) -> list[str]:
    """Stop what waits or runs; returns those tags. What they have done so far is kept."""
    rows = [r for r in read_status(results, tags) if r.alive or r.state == "waiting"]
    numbers = []
    for row in rows:
        # Before the signal: a job that is not there yet to hear it looks for this file.
        facts = {"kind": "jali-cancelled", "version": 1, "owner": asdict(me())}
        write_json(results.cancelled(row.tag), facts)
        last = last_submission(results, row.tag)
        owner = holder(results.lock(row.tag))
        if last is not None and last.on == "slurm" and row.alive:
            numbers.append(last.job)
        elif owner is not None and owner.alive() and owner.job is not None:
            numbers.append(owner.job)
        else:  # its process, or that of submitit where it has not begun yet
            process = owner if owner is not None or last is None else last.owner
            local = last is None or last.on == "local" or process is owner
            if process is not None and local and process.alive():
                os.kill(process.pid, signal.SIGTERM)
    cancel_jobs(numbers)
    return [row.tag for row in rows]


def _prepare(sweep: Sweep, results: Results, *, overwrite: bool) -> set[str]:
    """Refuse what cannot be launched, before anything is; then write down the sweep. Returns the
    tags that are done."""
    for experiment in sweep.experiments:
        if experiment.ranks > max(1, sweep.resources.gpus):
            raise ValueError(
                f"{experiment.tag} runs on {experiment.ranks} ranks, but a job gets "
                f"{sweep.resources.gpus} GPUs; give --gpus {experiment.ranks}"
            )
    known = [tag for tag in sweep.tags if results.config(tag).exists()]
    before = read_status(results, known, ask_slurm() if slurm_is_here() else SlurmAnswer({}))
    busy = [row for row in before if row.alive]
    if busy:
        raise LaunchError(
            f"{len(busy)} of the {len(sweep.tags)} experiments of {sweep.name} are still "
            f"{busy[0].state}, first {busy[0].tag}{_by(results, busy[0])}; see jali experiment "
            f"status {sweep.name}, or cancel them"
        )
    for experiment in sweep.experiments:
        check_free(results.lock(experiment.tag), f"the experiment {experiment.tag}", job_ended)
        is_written(experiment, results, overwrite=overwrite)
    for experiment in sweep.experiments:
        write_config(experiment, results, overwrite=overwrite)
    facts = {"kind": "jali-sweep", "version": 1, "name": sweep.name, "tags": list(sweep.tags)}
    facts |= {"resources": sweep.resources.to_dict()}
    write_json(results.sweep(sweep.name) / "sweep.json", facts)
    return {row.tag for row in before if row.state == "done"}


def _by(results: Results, row: Status) -> str:
    with contextlib.suppress(ValueError):
        if owner := holder(results.lock(row.tag)):
            return f" by {owner}"
    last = last_submission(results, row.tag)
    return "" if last is None else f" as job {row.job}, submitted by {last.owner.user}"


def _submit(
    cluster: Cluster,
    jobs: Sequence[Job],
    wait: bool,
    max_attempts: int,
    on_status: OnStatus | None,
    every: float,
    among: Sequence[str] = (),
) -> None:
    """Submit, and with `wait` stay until every job is done, cancelled, or has failed too often."""
    for job in jobs:
        job.results.cancelled(job.tag).unlink(missing_ok=True)
    if not jobs:
        return
    by_tag, results = {job.tag: job for job in jobs}, jobs[0].results
    before = {tag: len(read_submissions(results, tag)) for tag in by_tag}
    with _stop_on_leaving(cluster):
        again: Sequence[Job] = jobs
        while True:
            cluster.submit(again)
            if not wait:
                return
            cluster.start_waiting()
            slurm = ask_slurm() if cluster.where == "slurm" else SlurmAnswer({})
            rows = read_status(results, among or by_tag, slurm)
            if on_status is not None:
                on_status(rows)
            again, busy = [], bool(slurm.silent)
            for row in rows:
                if row.tag not in by_tag:
                    continue
                held = cluster.holds(row.tag)
                busy = busy or held or row.alive
                tries = row.submitted - before[row.tag]
                # Where Slurm is silent nobody knows, and nothing is done twice.
                if row.state in AGAIN and not held and tries < max_attempts and not slurm.silent:
                    log.warning("%s: %s (%s); trying again", row.tag, row.state, row.why)
                    again.append(by_tag[row.tag])
            if not busy and not again:
                return
            if not again:
                time.sleep(every)


@contextlib.contextmanager
def _stop_on_leaving(cluster: Cluster) -> Iterator[None]:
    """Ctrl-C, or any other way out, ends what runs only here."""
    try:
        yield
    except BaseException:
        cluster.stop()
        raise
