"""Where every experiment stands: from its own files and from Slurm, whichever knows better."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jali.experiments.experiment import Experiment
from jali.experiments.job import read_config
from jali.experiments.journal import Entry
from jali.experiments.ledger import Submission, submissions
from jali.experiments.lock import STALE_SECONDS
from jali.experiments.owner import Owner
from jali.experiments.results import Results
from jali.experiments.slurm import SlurmJob, SlurmSilentError, exit_code, slurm_jobs
from jali.experiments.stage import recorded_outputs
from jali.experiments.storage import UnreadableError, file_digest, read_json

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


@dataclass(frozen=True, slots=True)
class Slurm:
    """Slurm's answer, asked once for all tags; `silent` says why there is none."""

    jobs: Mapping[str, SlurmJob]
    silent: str = ""

    @classmethod
    def asked(cls) -> Slurm:
        try:
            return cls(slurm_jobs())
        except SlurmSilentError as error:
            return cls({}, str(error))


def read_status(results: Results, tags: Iterable[str], slurm: Slurm | None = None) -> list[Status]:
    """Of every tag once, in order. Slurm is only asked where something was submitted to it."""
    tags = list(dict.fromkeys(tags))
    if slurm is None:
        asked = any(s.on == "slurm" for tag in tags for s in submissions(results, tag)[-1:])
        slurm = Slurm.asked() if asked else Slurm({})
    return [_status(results, tag, slurm) for tag in tags]


def _status(results: Results, tag: str, slurm: Slurm) -> Status:
    """FileNotFoundError where there is no such experiment."""
    try:
        read_config(results, tag)
    except UnreadableError as error:
        return Status(tag, "damaged", why=str(error))
    sent = submissions(results, tag)
    last = sent[-1] if sent else None
    job = None if last is None or last.on != "slurm" else slurm.jobs.get(last.job)
    facts: dict[str, Any] = {
        "submitted": len(sent),
        "job": None if last is None else last.job,
    }
    try:
        entry = Entry.read(results.state(tag))
    except UnreadableError as error:
        told = _from_slurm(last, job, slurm)
        state, why = told if told and told[0] in ALIVE else ("damaged", "")
        return Status(tag, state, why="; ".join(filter(None, (why, str(error)))), **facts)
    if entry is not None:
        facts |= _progress(entry)
    state, why = _judge(results, tag, entry, last, job, slurm)
    if state != "running":
        facts["seconds_left"] = None
    return Status(tag, state, why=why, **facts)


def _judge(
    results: Results,
    tag: str,
    entry: Entry | None,
    last: Submission | None,
    job: SlurmJob | None,
    slurm: Slurm,
) -> tuple[str, str]:
    """(state, why)."""
    if entry is not None and entry.state == "done":
        why = why_not_whole(results, tag)
        if not why:
            return "done", ""
        told = _from_slurm(last, job, slurm)
        return told if told and told[0] in ALIVE else ("damaged", why)
    if entry is not None and entry.state == "running":
        # A run by hand, on this machine or another, beside whatever was submitted.
        running = _process(entry, slurm)
        if running:
            return "running", ""
    told = _from_slurm(last, job, slurm)
    if told is not None and told[0] in ALIVE:
        return told
    if last is not None and last.on == "local" and last.owner.alive():
        return "running", "starting"
    if results.cancelled(tag).exists():
        return "cancelled", _who(results, tag)
    if entry is None:
        if told is not None:
            return told
        if last is not None and last.on == "slurm":
            silent = f": {slurm.silent}" if slurm.silent else ""
            known = "Slurm does not answer" if silent else f"Slurm does not know job {last.job}"
            return ("waiting" if silent else "lost"), f"{known}{silent}"
        if last is not None and last.owner.alive() is False:
            return "lost", "it was started on this machine, and its process is gone"
        return "waiting", ""
    if entry.state == "running":
        return _vanished(entry, told, slurm)
    if told is not None and told[0] == "cancelled":
        return told
    if entry.state == "stopped":
        return "failed", f"stopped: {entry.error}"
    return "failed", entry.error or ""


def _vanished(entry: Entry, told: tuple[str, str] | None, slurm: Slurm) -> tuple[str, str]:
    """Its file says running, and no process is known that would do it."""
    if told is not None:
        return told
    quiet = time.time() - entry.updated
    if slurm.silent and entry.owner.job is not None:
        state = "running" if quiet < STALE_SECONDS else "lost"
        return state, f"Slurm does not answer ({slurm.silent}); last sign of life {_ago(quiet)}"
    if entry.owner.alive() is None and entry.owner.job is None and quiet < STALE_SECONDS:
        return "running", f"on {entry.owner.host}, last sign of life {_ago(quiet)}"
    return "lost", f"{entry.owner} is gone; last sign of life {_ago(quiet)}"


def _process(entry: Entry, slurm: Slurm) -> bool:
    """Whether the process that wrote the file certainly lives."""
    if entry.owner.job is not None:
        job = slurm.jobs.get(entry.owner.job)
        if job is not None:
            # On this machine the process itself can be asked too: one that was killed is gone
            # before Slurm has noticed.
            return job.running and entry.owner.alive() is not False
    return entry.owner.alive() is True


def _from_slurm(
    last: Submission | None, job: SlurmJob | None, slurm: Slurm
) -> tuple[str, str] | None:
    """What Slurm says of the latest submission; None where it says nothing."""
    if last is None or last.on != "slurm" or job is None:
        return None
    if job.waiting:
        return "queued", job.why
    if job.running:
        return "running", ""
    if job.state == "CANCELLED":
        return "cancelled", f"Slurm job {job.number} was cancelled"
    code = exit_code(job.number) if not slurm.silent else ""
    return "failed", f"{job.why} ({job.state}{f', exit code {code}' if code else ''})"


def why_not_whole(results: Results, tag: str) -> str:
    """What of a finished experiment's numbers is missing or changed, in words."""
    for stage, path in (("benchmark", results.speed(tag)), ("quality", results.quality(tag))):
        try:
            read_json(path)
            expected = recorded_outputs(results, tag, stage)
            if expected.get(path.name) != file_digest(path):
                return f"{path} is not what the stage {stage} wrote"
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
        except UnreadableError as error:
            return str(error)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    return ""


def _progress(entry: Entry) -> dict[str, Any]:
    return {
        "stage": None if entry.state == "done" else entry.stage,
        "done": entry.done,
        "total": entry.total,
        "share": entry.share,
        "seconds": entry.seconds,
        "seconds_left": entry.seconds_left,
        "attempts": entry.attempt,
    }


def _who(results: Results, tag: str) -> str:
    try:
        return f"by {Owner.from_dict(read_json(results.cancelled(tag))['owner'])}"
    except (OSError, ValueError, KeyError):
        return ""


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def find_tags(results: Results, names: Iterable[str]) -> list[str]:
    """The experiments that tags and names of sweeps stand for, each once. None named: all."""
    names = list(names)
    if not names:
        return results.tags()
    found: list[str] = []
    for name in names:
        tags = sweep_tags(results, name)
        if tags is None:
            if not results.config(name).exists():
                from jali.methods import near

                known = [*results.sweeps(), *results.tags()]
                raise FileNotFoundError(
                    f"no experiment and no sweep {name!r} in {results.root}"
                    + (near(name, known) if known else "")
                )
            tags = [name]
        found += tags
    return list(dict.fromkeys(found))


def sweep_tags(results: Results, name: str) -> list[str] | None:
    """The tags of a sweep that was launched; None where there is none of that name."""
    try:
        data = read_json(results.sweep_file(name), "jali-sweep")
        return [str(tag) for tag in data["tags"]]
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise UnreadableError(f"{results.sweep_file(name)} lists no tags") from error


def experiments_of(results: Results, tags: Iterable[str]) -> list[Experiment]:
    return [read_config(results, tag) for tag in tags]
