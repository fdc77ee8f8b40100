"""What Slurm says of jobs, without an accounting database.

submitit asks `sacct`, which needs one: where there is none it waits forever for a job that was
cancelled. `squeue` knows every job that waits or runs, and for some minutes those that ended.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from jali.experiments.owner import me

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
    "CANCELLED": "cancelled",
}
SECONDS = 30


class SlurmSilentError(RuntimeError):
    """Slurm is not here, or does not answer: nothing can be said of its jobs."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as squeue lists it; `left` is what remains of its time limit."""

    number: str
    state: str
    left: str
    reason: str
    node: str

    @property
    def waiting(self) -> bool:
        return self.state in WAITING

    @property
    def running(self) -> bool:
        return self.state in RUNNING

    @property
    def ended(self) -> bool:
        return not (self.waiting or self.running)

    @property
    def why(self) -> str:
        """Why it waits, or how it ended."""
        if self.ended:
            return WHY.get(self.state, self.state.lower())
        return "" if self.reason in ("None", "") else self.reason


def slurm_is_here() -> bool:
    return shutil.which("squeue") is not None and shutil.which("sbatch") is not None


def slurm_jobs() -> dict[str, SlurmJob]:
    """Every job of this user that Slurm still knows, by its number (array tasks as 12_3)."""
    # %T before the free text: a reason may hold anything but a line break.
    form = "%i|%T|%L|%N|%r"
    command = ["squeue", "--noheader", "--array", "--states=all", "--user", me().user, "-o", form]
    jobs = {}
    for line in _ask(command).splitlines():
        parts = line.strip().split("|", 4)
        if len(parts) == 5:
            number, state, left, node, reason = parts
            jobs[number] = SlurmJob(number, state, left, reason.strip("()"), node)
    return jobs


def exit_code(number: str) -> str:
    """`code:signal` of a job that ended not long ago; empty where Slurm has forgotten it."""
    try:
        text = _ask(["scontrol", "show", "job", "--oneliner", number])
    except SlurmSilentError:
        return ""
    return next((w.partition("=")[2] for w in text.split() if w.startswith("ExitCode=")), "")


def job_ended(number: str) -> bool:
    """Whether Slurm is sure that a job no longer runs."""
    try:
        found = slurm_jobs().get(number)
    except SlurmSilentError:
        return False
    return found is None or found.ended


def scancel(numbers: Sequence[str]) -> None:
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
