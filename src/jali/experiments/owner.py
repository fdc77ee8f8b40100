"""Who does something, and whether they still do."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Owner:
    """A process on a machine. `born` tells it from a later process with the same number."""

    user: str
    host: str
    pid: int
    born: int
    job: str | None = None  # the scheduler's number, where there is one

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Owner:
        if not isinstance(data, dict):
            raise ValueError(f"an owner is an object, got {data!r}")
        try:
            return cls(
                str(data["user"]), str(data["host"]), int(data["pid"]), int(data["born"]),
                None if data.get("job") is None else str(data["job"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"an owner has user, host, pid and born, got {data!r}") from error

    def alive(self) -> bool | None:
        """Whether the process runs; None where another machine would have to be asked."""
        if self.host != socket.gethostname():
            return None
        return _born(self.pid) == self.born

    def __str__(self) -> str:
        job = "" if self.job is None else f", Slurm job {self.job}"
        return f"{self.user} on {self.host} (process {self.pid}{job})"


def me() -> Owner:
    return Owner(_user(), socket.gethostname(), os.getpid(), _born(os.getpid()) or 0, slurm_job())


def process(pid: int) -> Owner:
    """A process on this machine that someone else started."""
    return Owner(_user(), socket.gethostname(), pid, _born(pid) or 0)


def slurm_job() -> str | None:
    """The job this process runs in, as squeue writes it."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in some containers
        return str(os.getuid())


def _born(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where it has ended.

    One that has ended but was not waited for is a zombie: it still has its number, and is dead.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _answers(pid)
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def _answers(pid: int) -> int | None:
    """Where there is no /proc a signal that does nothing tells; numbers may then be reused."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0
