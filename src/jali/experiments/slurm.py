"""What Slurm says of jobs, without an accounting database.

submitit asks `sacct`, which needs one: where there is none it waits forever for a job that was
cancelled. `squeue` knows every job that waits or runs, and for some minutes those that ended.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jali.error import JobError
from jali.experiments.lock import me

WAITING = {
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}  # fmt: skip
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
WHY = {
    "FAILED": "the process ended with an error",
    "TIMEOUT": "the time limit was reached",
    "NODE_FAIL": "the node failed",
    "OUT_OF_MEMORY": "the job ran out of memory",
    "PREEMPTED": "pre-empted by another job",
    "DEADLINE": "its deadline passed",
    "BOOT_FAIL": "the node did not start",
    "COMPLETED": "the process ended",
}
SECONDS = 30


class SlurmSilentError(JobError):
    """Slurm is not here, or does not answer: nothing can be said of its jobs."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as squeue lists it; `reason` is why it waits."""

    number: str
    state: str
    reason: str = ""

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def running(self) -> bool:
        return self.state in RUNNING


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """Every job that Slurm knows, by its number; `silent` says why there is no answer."""

    jobs: Mapping[str, SlurmJob]
    silent: str = ""


def slurm_is_here() -> bool:
    return shutil.which("squeue") is not None and shutil.which("sbatch") is not None


def slurm_jobs() -> dict[str, SlurmJob]:
    """Every job of this user that Slurm still knows, by its number (array tasks as 12_3)."""
    # The free text comes last: a reason may hold anything but a line break.
    command = ["squeue", "--noheader", "--array", "--states=all", "--user", me().user]
    jobs = {}
    for line in _ask([*command, "-o", "%i|%T|%r"]).splitlines():
        parts = line.strip().split("|", 2)
        if len(parts) == 3:
            number, state, reason = parts
            jobs[number] = SlurmJob(number, state, reason.strip("()").removeprefix("None"))
    return jobs


def ask_slurm() -> SlurmAnswer:
    """As `slurm_jobs`; no answer is an answer too."""
    try:
        return SlurmAnswer(slurm_jobs())
    except SlurmSilentError as error:
        return SlurmAnswer({}, str(error))


def job_ended(number: str) -> bool:
    """Whether Slurm is sure that a job no longer runs."""
    answer = ask_slurm()
    job = answer.jobs.get(number)
    return not answer.silent and (job is None or not (job.waiting or job.running))


def why_ended(job: SlurmJob) -> str:
    """How a job ended, with its exit code where Slurm has not forgotten it."""
    try:
        text = _ask(["scontrol", "show", "job", "--oneliner", job.number])
    except SlurmSilentError:
        text = ""
    code = next((w.partition("=")[2] for w in text.split() if w.startswith("ExitCode=")), "")
    why = WHY.get(job.state, job.state.lower())
    return f"{why} ({job.state}{f', exit code {code}' if code else ''})"


def cancel_jobs(numbers: Sequence[str]) -> None:
    if numbers:
        _ask(["scancel", *numbers])


def _ask(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise SlurmSilentError(f"{command[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilentError(f"{command[0]} did not answer within {SECONDS} seconds") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SlurmSilentError(f"{command[0]}: {said}")
    return done.stdout
