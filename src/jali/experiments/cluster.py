"""Where experiments are handed to, through submitit: an array on Slurm, or jobs on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jali.experiments import ledger
from jali.experiments.job import Task
from jali.experiments.owner import process
from jali.experiments.resources import Resources
from jali.experiments.slurm import slurm_is_here


class LaunchError(RuntimeError):
    """Nothing was submitted, and why."""


class Cluster(Protocol):
    """Takes tasks, and starts them when there is room."""

    where: str

    def submit(self, tasks: Sequence[Task]) -> None: ...

    def tick(self) -> None:
        """Start what there is room for now."""
        ...

    def holds(self, tag: str) -> bool:
        """Whether a tag waits here or runs, whatever its files say."""
        ...

    def stop(self) -> None:
        """Start nothing more, and end what runs where leaving ends it."""
        ...


@dataclass
class OnSlurm:
    """One array for all tasks of a submission. What becomes of it is Slurm's to say."""

    folder: Path
    resources: Resources
    name: str
    max_parallel: int | None = None
    where: str = "slurm"

    def submit(self, tasks: Sequence[Task]) -> None:
        if not tasks:
            return
        executor = self.executor()
        try:
            with executor.batch():
                jobs = [executor.submit(task) for task in tasks]
        except Exception as error:
            raise LaunchError(f"sbatch refused the jobs: {_last_line(error)}") from error
        for task, job in zip(tasks, jobs, strict=True):
            ledger.enter(
                task.results, task.experiment.tag, self.where, job.job_id, str(self.folder),
                self.resources,
            )  # fmt: skip

    def executor(self) -> Any:
        import submitit

        if not slurm_is_here():
            raise LaunchError(
                "Slurm is not on this machine (no sbatch and squeue); launch from a login node, "
                "or use --on local"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        executor = submitit.SlurmExecutor(folder=self.folder)
        executor.update_parameters(**self.parameters())
        return executor

    def parameters(self) -> dict[str, Any]:
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
            **{n: getattr(asked, n) for n in ("partition", "account", "qos", "constraint")},
        }
        return {name: value for name, value in found.items() if value is not None}

    def script(self, count: int) -> str:
        """What sbatch would read, to show before anything is submitted."""
        from submitit.slurm.slurm import _make_sbatch_string

        asked = self.parameters() | ({"map_count": count} if count > 1 else {})
        return _make_sbatch_string("python -m submitit.core._submit JOBS", self.folder, **asked)

    def tick(self) -> None:
        pass

    def holds(self, tag: str) -> bool:  # noqa: ARG002
        return False

    def stop(self) -> None:
        """Jobs of a cluster outlive the one who watches them."""


@dataclass
class OnThisMachine:
    """submitit's local jobs, `max_parallel` at a time, each with GPUs of its own."""

    folder: Path
    resources: Resources
    max_parallel: int = 1
    gpus: Sequence[int] = ()
    where: str = "local"
    _queue: list[Task] = field(default_factory=list)
    _running: dict[int, tuple[Task, Any]] = field(default_factory=dict)  # by slot

    def submit(self, tasks: Sequence[Task]) -> None:
        self._queue += tasks
        self.tick()

    def tick(self) -> None:
        for slot, (_, job) in list(self._running.items()):
            if job.done():
                del self._running[slot]
        for slot in range(self.max_parallel):
            while slot not in self._running and self._queue:
                task = self._queue.pop(0)
                if task.results.cancelled(task.experiment.tag).exists():
                    continue
                self._running[slot] = (task, self._start(task, slot))

    def _start(self, task: Task, slot: int) -> Any:
        import submitit

        each = self.resources.gpus if self.gpus else 0
        executor = submitit.LocalExecutor(folder=self.folder)
        executor.update_parameters(
            timeout_min=self.resources.minutes, gpus_per_node=each, stderr_to_stdout=True,
            visible_gpus=tuple(self.gpus[slot * each : (slot + 1) * each]),
        )  # fmt: skip
        job: Any = executor.submit(task)
        tag, number = task.experiment.tag, str(job.job_id)
        ledger.enter(
            task.results, tag, self.where, number, str(self.folder), self.resources,
            owner=process(int(number)),
        )  # fmt: skip
        return job

    def holds(self, tag: str) -> bool:
        waiting = [task for task in self._queue if task.experiment.tag == tag]
        return bool(waiting) or any(t.experiment.tag == tag for t, _ in self._running.values())

    def stop(self) -> None:
        self._queue.clear()
        # A launcher that a script put into the background ignores Ctrl-C, and so do its children.
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for _, job in self._running.values():
            if not deaf:
                job.cancel()
            elif not job.done():
                os.kill(int(job.job_id), signal.SIGTERM)
        end = time.monotonic() + 30
        while any(not job.done() for _, job in self._running.values()):
            if time.monotonic() > end:
                break
            time.sleep(0.1)


def cluster_for(
    on: str, resources: Resources, folder: Path, name: str, max_parallel: int | None
) -> Cluster:
    """Slurm, or as many jobs of this machine at a time as its GPUs have room for."""
    if importlib.util.find_spec("submitit") is None:
        raise ValueError("launching needs submitit: pip install 'jali[slurm]'")
    if on == "slurm":
        return OnSlurm(folder / "jobs", resources, name, max_parallel)
    gpus = _gpus() if resources.gpus else 0
    room = max(1, gpus // resources.gpus) if gpus else None
    if gpus and resources.gpus > gpus:
        raise ValueError(f"a job asks for {resources.gpus} GPUs, and this machine has {gpus}")
    if room is not None and max_parallel is not None and max_parallel > room:
        raise ValueError(
            f"--max-parallel {max_parallel} jobs of {resources.gpus} GPUs each do not fit on the "
            f"{gpus} GPUs of this machine; at most {room} do"
        )
    return OnThisMachine(folder / "jobs", resources, max_parallel or room or 1, range(gpus))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _last_line(error: BaseException) -> str:
    """submitit repeats the whole script; what sbatch said is at the end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "error:" in line]
    return (said or lines or [type(error).__name__])[-1]
