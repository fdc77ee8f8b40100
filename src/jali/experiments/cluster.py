"""Where experiments are handed to, through submitit: an array on Slurm, or jobs on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jali.error import JobError
from jali.experiments.job import Job
from jali.experiments.lock import Owner, me
from jali.experiments.resources import Resources
from jali.experiments.slurm import slurm_is_here
from jali.experiments.submission import Submission, add_submission


class LaunchError(JobError):
    """Nothing was submitted, and why."""


@dataclass
class Cluster:
    """Takes jobs, and starts them when there is room."""

    folder: Path
    resources: Resources
    max_parallel: int | None = None
    where = ""

    def submit(self, jobs: Sequence[Job]) -> None:
        raise NotImplementedError

    def start_waiting(self) -> None:
        """Start what there is room for now."""

    def holds(self, tag: str) -> bool:  # noqa: ARG002
        """Whether a tag waits here or runs, whatever its files say."""
        return False

    def stop(self) -> None:
        """Start nothing more, and end what runs where leaving ends it."""

    def _note(self, job: Job, number: str, owner: Owner) -> None:
        submission = Submission(self.where, number, owner, str(self.folder), self.resources)
        add_submission(job.results, job.tag, submission)


@dataclass
class SlurmCluster(Cluster):
    """One array for all jobs of a submission. What becomes of it is Slurm's to say, and it
    outlives the one who watches."""

    name: str = "experiment"
    where = "slurm"

    def submit(self, jobs: Sequence[Job]) -> None:
        import submitit

        if not jobs:
            return
        if not slurm_is_here():
            raise LaunchError(
                "Slurm is not on this machine (no sbatch and squeue); launch from a login node, "
                "or use --on local"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        executor: Any = submitit.SlurmExecutor(folder=self.folder)
        executor.update_parameters(**self._parameters())
        try:
            with executor.batch():
                submitted = [executor.submit(job) for job in jobs]
        except Exception as error:
            raise LaunchError(f"sbatch refused the jobs: {_last_line(error)}") from error
        for job, sent in zip(jobs, submitted, strict=True):
            self._note(job, sent.job_id, me())

    def script(self, count: int) -> str:
        """What sbatch would read, to show before anything is submitted."""
        from submitit.slurm.slurm import _make_sbatch_string

        asked = self._parameters() | ({"map_count": count} if count > 1 else {})
        return _make_sbatch_string("python -m submitit.core._submit JOBS", self.folder, **asked)

    def _parameters(self) -> dict[str, Any]:
        """As submitit names them. `--gres` is understood by every Slurm, `--gpus` is not."""
        asked = self.resources
        found: dict[str, Any] = {
            "job_name": f"jali-{self.name}",
            "time": asked.minutes,
            "mem": f"{asked.megabytes}MB",
            "cpus_per_task": asked.cpus_per_task,
            "stderr_to_stdout": True,
            # The warning before the time limit: enough to leave a step and be queued again.
            "signal_delay_s": min(120, asked.minutes * 30),
            "gres": f"gpu:{asked.gpus}" if asked.gpus else None,
            "array_parallelism": self.max_parallel,
            "additional_parameters": {"requeue": True},
            **asked.names(),
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass
class LocalCluster(Cluster):
    """submitit's jobs on this machine, `max_parallel` at a time, each with GPUs of its own."""

    gpus: Sequence[int] = ()
    where = "local"
    _waiting: list[Job] = field(default_factory=list)
    _running: dict[int, tuple[Job, Any]] = field(default_factory=dict)  # by slot

    def submit(self, jobs: Sequence[Job]) -> None:
        self._waiting += jobs
        self.start_waiting()

    def start_waiting(self) -> None:
        self._running = {s: pair for s, pair in self._running.items() if not pair[1].done()}
        for slot in range(self.max_parallel or 1):
            while slot not in self._running and self._waiting:
                job = self._waiting.pop(0)
                if not job.results.cancelled(job.tag).exists():
                    self._running[slot] = job, self._start(job, slot)

    def _start(self, job: Job, slot: int) -> Any:
        import submitit

        each = self.resources.gpus if self.gpus else 0
        executor: Any = submitit.LocalExecutor(folder=self.folder)
        executor.update_parameters(
            timeout_min=self.resources.minutes, gpus_per_node=each, stderr_to_stdout=True,
            visible_gpus=tuple(self.gpus[slot * each : (slot + 1) * each]),
        )  # fmt: skip
        started = executor.submit(job)
        self._note(job, started.job_id, Owner.of(int(started.job_id)))
        return started

    def holds(self, tag: str) -> bool:
        return any(
            tag == job.tag for job in [*self._waiting, *(j for j, _ in self._running.values())]
        )

    def stop(self) -> None:
        self._waiting.clear()
        started = [one for _, one in self._running.values()]
        # A launcher that a script put into the background ignores Ctrl-C, and so do its children.
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for one in started:
            if not one.done():
                os.kill(int(one.job_id), signal.SIGTERM if deaf else signal.SIGINT)
        end = time.monotonic() + 30
        while not all(one.done() for one in started) and time.monotonic() < end:
            time.sleep(0.1)


def open_cluster(
    on: str, resources: Resources, folder: Path, name: str, max_parallel: int | None
) -> Cluster:
    """Slurm, or as many jobs of this machine at a time as its GPUs have room for."""
    if importlib.util.find_spec("submitit") is None:
        raise ValueError("launching needs submitit: pip install 'jali[slurm]'")
    folder = folder / "jobs"
    if on == "slurm":
        return SlurmCluster(
            folder=folder, resources=resources, max_parallel=max_parallel, name=name
        )
    gpus = _gpus() if resources.gpus else 0
    if gpus and resources.gpus > gpus:
        raise ValueError(f"a job asks for {resources.gpus} GPUs, and this machine has {gpus}")
    room = gpus // resources.gpus if gpus else None
    if room is not None and max_parallel is not None and max_parallel > room:
        raise ValueError(
            f"--max-parallel {max_parallel} jobs of {resources.gpus} GPUs each do not fit on the "
            f"{gpus} GPUs of this machine; at most {room} do"
        )
    return LocalCluster(
        folder=folder, resources=resources, max_parallel=max_parallel or room, gpus=range(gpus)
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _last_line(error: BaseException) -> str:
    """submitit repeats the whole script; what sbatch said is at the end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "error:" in line]
    return (said or lines or [type(error).__name__])[-1]
