"""Where every experiment stands: from its own files and from Slurm, whichever knows better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jali.experiments.job import read_config, who_cancelled
from jali.experiments.lock import STALE_SECONDS
from jali.experiments.results import Results
from jali.experiments.slurm import SlurmAnswer, SlurmJob, ask_slurm, why_ended
from jali.experiments.stage import damage, read_record
from jali.experiments.state import State
from jali.experiments.submission import Submission, read_submissions
from jali.files import UnreadableError, read_json

# waiting: nobody was asked to run it · queued: Slurm has it · lost: it says it runs, and does not
STATES = ("waiting", "queued", "running", "done", "failed", "cancelled", "lost", "damaged")
ALIVE = ("queued", "running")
AGAIN = ("failed", "lost", "damaged")  # what a bounded retry takes up by itself


@dataclass(frozen=True, slots=True)
class Status:
    """One row of the table. `why` explains, in words, whatever is not plain sailing."""

    tag: str
    state: str
    stage: str | None = None
    done: int = 0
    total: int = 0
    share: float = 0.0
    seconds: float | None = None
    seconds_left: float | None = None
    attempts: int = 0
    submitted: int = 0
    job: str | None = None
    why: str = ""

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


def read_status(
    results: Results, tags: Iterable[str], slurm: SlurmAnswer | None = None
) -> list[Status]:
    """Of every tag once, in order; FileNotFoundError where there is no such experiment.

    Slurm is only asked where something was submitted to it.

    >>> [row.state for row in read_status(results, ["first"])]  # doctest: +SKIP
    ['done']
    """
    sent = {tag: read_submissions(results, tag) for tag in dict.fromkeys(tags)}
    if slurm is None:
        asked = any(s.on == "slurm" for submissions in sent.values() for s in submissions[-1:])
        slurm = ask_slurm() if asked else SlurmAnswer({})
    return [_status(results, tag, submissions, slurm) for tag, submissions in sent.items()]


def _status(results: Results, tag: str, sent: list[Submission], slurm: SlurmAnswer) -> Status:
    last = sent[-1] if sent else None
    facts: dict[str, Any] = {"submitted": len(sent), "job": None if last is None else last.job}
    state, damaged = None, ""
    try:
        read_config(results.config(tag))
        state = State.read(results.state(tag))
    except UnreadableError as error:
        damaged = str(error)
    found, why = _judge(results, tag, state, last, slurm, damaged)
    if state is not None:
        facts |= {
            "stage": None if state.state == "done" else state.stage,
            "done": state.done, "total": state.total, "share": state.share,
            "seconds": state.seconds, "attempts": state.attempt,
            "seconds_left": state.seconds_left if found == "running" else None,
        }  # fmt: skip
    return Status(tag, found, why=why, **facts)


def _judge(
    results: Results,
    tag: str,
    state: State | None,
    last: Submission | None,
    slurm: SlurmAnswer,
    damaged: str,
) -> tuple[str, str]:
    """(state, why): the living before the dead, and of the dead what is most certain."""
    if state is not None and state.state == "done":
        damaged = damaged or why_not_whole(results, tag)
        if not damaged:
            return "done", ""
    job = slurm.jobs.get(last.job) if last is not None and last.on == "slurm" else None
    if state is not None and state.state == "running" and _lives(state, slurm):
        return "running", ""  # by hand perhaps, beside whatever was submitted
    if job is not None and job.waiting:
        return "queued", job.reason
    if job is not None and job.running:
        return "running", ""
    if last is not None and last.on == "local" and last.owner.alive():
        return "running", "starting"
    if damaged:
        return "damaged", damaged
    if who := who_cancelled(results, tag):
        return "cancelled", who
    if state is None:
        return _never_began(last, job, slurm)
    if state.state == "running":
        return _vanished(state, job, slurm)
    if job is not None and job.state == "CANCELLED":
        return _ended(job)
    stopped = "stopped: " if state.state == "stopped" else ""
    return "failed", f"{stopped}{state.error or ''}"


def _lives(state: State, slurm: SlurmAnswer) -> bool:
    """Whether the process that wrote the file certainly lives. On this machine it can be asked
    itself, and one that was killed is gone before Slurm has noticed."""
    job = slurm.jobs.get(state.owner.job or "")
    return state.owner.alive() is True if job is None else (
        job.running and state.owner.alive() is not False
    )  # fmt: skip


def _never_began(
    last: Submission | None, job: SlurmJob | None, slurm: SlurmAnswer
) -> tuple[str, str]:
    if job is not None:
        return _ended(job)
    if last is not None and last.on == "slurm":
        if slurm.silent:
            return "waiting", f"Slurm does not answer: {slurm.silent}"
        return "lost", f"Slurm does not know job {last.job}"
    if last is not None and last.owner.alive() is False:
        return "lost", "it was started on this machine, and its process is gone"
    return "waiting", ""


def _vanished(state: State, job: SlurmJob | None, slurm: SlurmAnswer) -> tuple[str, str]:
    """Its file says running, and no process is known that would do it."""
    if job is not None:
        return _ended(job)
    owner, quiet = state.owner, state.quiet
    ago = f"{quiet:.0f} s ago" if quiet < 120 else f"{quiet / 60:.0f} min ago"
    believed = "running" if quiet < STALE_SECONDS else "lost"
    if slurm.silent and owner.job is not None:
        return believed, f"Slurm does not answer ({slurm.silent}); last sign of life {ago}"
    if owner.alive() is None and owner.job is None and believed == "running":
        return believed, f"on {owner.host}, last sign of life {ago}"
    return "lost", f"{owner} is gone; last sign of life {ago}"


def _ended(job: SlurmJob) -> tuple[str, str]:
    """What Slurm says of a job that no longer runs."""
    if job.state == "CANCELLED":
        return "cancelled", f"Slurm job {job.number} was cancelled"
    return "failed", why_ended(job)


def why_not_whole(results: Results, tag: str) -> str:
    """What of a finished experiment's numbers is missing or changed, in words."""
    for stage, path in (("benchmark", results.speed(tag)), ("quality", results.quality(tag))):
        try:
            read_json(path)
            why = damage(path.parent, path.name, read_record(results, tag, stage)[1])
        except FileNotFoundError as error:
            why = f"{error.filename} is missing"
        except UnreadableError as error:
            why = str(error)
        if why:
            return why
    return ""
