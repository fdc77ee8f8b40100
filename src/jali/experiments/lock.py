"""One owner at a time: a file that says who, and is taken over only from the dead.

A lock file is created exclusively, which holds on every file system that nodes share, NFS without
`flock` too. It names its owner, so that whoever comes second can say who has it, and ask whether
that one still lives.
"""

from __future__ import annotations

import contextlib
import datetime
import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jali.error import JobError
from jali.files import read_json

KIND = "jali-lock"
STALE_SECONDS = 600.0  # of an owner on another machine that nobody can ask
TAKEOVER_SECONDS = 60.0  # after which one who died while taking over is no longer waited for
JobEnded = Callable[[str], bool]  # whether Slurm is sure that a job no longer runs


@dataclass(frozen=True, slots=True)
class Owner:
    """A process on a machine. `born` tells it from a later process with the same number."""

    user: str
    host: str
    pid: int
    born: int
    job: str | None = None  # Slurm's number, where there is one

    @classmethod
    def of(cls, pid: int, job: str | None = None) -> Owner:
        """A process on this machine."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a number without a name, as in some containers
            user = str(os.getuid())
        return cls(user, socket.gethostname(), pid, _born(pid) or 0, job)

    @classmethod
    def from_dict(cls, data: Any) -> Owner:
        try:
            job = data.get("job")
            return cls(
                str(data["user"]), str(data["host"]), int(data["pid"]), int(data["born"]),
                None if job is None else str(job),
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"an owner has user, host, pid and born, got {data!r}") from error

    def alive(self) -> bool | None:
        """Whether the process runs; None where another machine would have to be asked."""
        return _born(self.pid) == self.born if self.host == socket.gethostname() else None

    def __str__(self) -> str:
        job = "" if self.job is None else f", Slurm job {self.job}"
        return f"{self.user} on {self.host} (process {self.pid}{job})"


def me() -> Owner:
    """This process, and the Slurm job it runs in, as squeue writes it."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    return Owner.of(os.getpid(), job)


class HeldError(JobError):
    """Someone else has it."""

    def __init__(self, what: str, owner: Owner | None, since: str, path: Path) -> None:
        super().__init__(
            f"{what} is held by {owner or 'an unknown process'} since {since}; wait, cancel it, or "
            f"delete {path} if that process is gone for certain"
        )
        self.job = None if owner is None else owner.job


@contextlib.contextmanager
def hold(
    path: Path, what: str, *, job_ended: JobEnded = lambda _: False, patience: float = 60.0
) -> Iterator[None]:
    """Hold the lock at `path` while the block runs; `HeldError` where someone else has it.

    A job that Slurm started again waits up to `patience` seconds for its own earlier self to end.
    """
    own, end = me(), time.monotonic() + patience
    path.parent.mkdir(parents=True, exist_ok=True)
    while not _create(path, what, own):
        try:
            _remove_dead(path, what, job_ended)
        except HeldError as held:
            if own.job is None or held.job != own.job or time.monotonic() > end:
                raise
            time.sleep(0.5)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if holder(path) == own:
                path.unlink()


def holder(path: Path) -> Owner | None:
    """Who holds a lock; None where it is free."""
    try:
        return Owner.from_dict(read_json(path, KIND).get("owner"))
    except FileNotFoundError:
        return None


def check_free(path: Path, what: str, job_ended: JobEnded = lambda _: False) -> None:
    """`HeldError` unless a lock is free, or its owner certainly gone.

    An owner on this machine is asked by its process number, one in a Slurm job by `job_ended`. Any
    other is believed for ten minutes after the file was last touched (see `touch`), and so is a
    lock that cannot be read: its writer may have just created it.
    """
    _is_dead(path, what, job_ended)


def _is_dead(path: Path, what: str, job_ended: JobEnded) -> bool:
    """Whether the lock of a dead owner is there; `HeldError` where that of a living one is."""
    owner, since = None, "an unknown time"
    try:
        owner = holder(path)
        if owner is None:
            return False
        since = str(read_json(path).get("since"))
        dead = None if owner.alive() is None else not owner.alive()
        if dead is None and owner.job is not None:
            # Slurm may start the same job again on another node after a node failed.
            dead = owner.job == me().job or job_ended(owner.job)
    except FileNotFoundError:  # it was let go in this very moment
        return False
    except ValueError:
        dead = None
    if dead is None:
        age = _age(path)
        if age == float("inf"):
            return False
        dead = age > STALE_SECONDS
    if not dead:
        raise HeldError(what, owner, since, path)
    return True


def now(timespec: str = "seconds") -> str:
    """As files here hold it: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)


def touch(path: Path) -> None:
    """A sign of life, for those who cannot ask."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _create(path: Path, what: str, own: Owner) -> bool:
    facts = {"kind": KIND, "version": 1, "what": what, "since": now(), "owner": asdict(own)}
    try:
        with path.open("x") as file:
            try:
                file.write(json.dumps(facts))
                file.flush()
                os.fsync(file.fileno())
            except OSError:  # a full disk: an empty lock would be nobody's
                path.unlink()
                raise
    except FileExistsError:
        return False
    return True


def _remove_dead(path: Path, what: str, job_ended: JobEnded) -> None:
    """Remove the lock of a dead owner. Of all who find it dead one at a time looks again and
    removes it, so that nobody removes what another has taken meanwhile."""
    if not _is_dead(path, what, job_ended):
        return
    guard = path.with_name(f".{path.name}.takeover")
    try:
        guard.touch(exist_ok=False)
    except FileExistsError:
        if _age(guard) > TAKEOVER_SECONDS:
            guard.unlink(missing_ok=True)
        time.sleep(0.05)
        return
    try:
        # Where nothing is there any more, somebody may create it before the next line.
        if _is_dead(path, what, job_ended):
            path.unlink(missing_ok=True)
    finally:
        guard.unlink(missing_ok=True)


def _age(path: Path) -> float:
    """Seconds since a file was touched; no end of them where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _born(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where it has ended.

    One that has ended but was not waited for is a zombie: it still has its number, and is dead.
    Where there is no /proc a signal that does nothing tells; numbers may then be reused.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except OSError as error:
            return 0 if isinstance(error, PermissionError) else None
        return 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
