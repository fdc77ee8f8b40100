"""One owner at a time: a file that says who, and is taken over only from the dead."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jali.experiments.owner import Owner, me
from jali.experiments.storage import UnreadableError, read_json, write_json

STALE_SECONDS = 600.0  # of an owner on another machine that nobody can ask


class HeldError(RuntimeError):
    """Someone else has it."""

    def __init__(self, what: str, owner: Owner | None, since: str, path: Path) -> None:
        super().__init__(
            f"{what} is held by {owner or 'an unknown process'} since {since}; wait, cancel it, or "
            f"delete {path} if that process is gone for certain"
        )
        self.job = None if owner is None else owner.job


@contextlib.contextmanager
def locked(
    path: Path,
    what: str,
    *,
    job_ended: Callable[[str], bool] = lambda _: False,
    patience: float = 60.0,
) -> Iterator[None]:
    """Hold the lock at `path` while the block runs; `HeldError` where someone else has it.

    An owner on this machine is asked by its process number, an owner in a Slurm job by
    `job_ended`, which says whether the scheduler is sure that a job no longer runs. Any other
    owner is believed for ten minutes after the file was last touched (see `touch`). A job that
    Slurm started again waits up to `patience` seconds for its own earlier self to end.
    """
    own = me()
    end = time.monotonic() + patience
    while True:
        try:
            _take(path, what, own, job_ended)
            break
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
        return Owner.from_dict(read_json(path, "jali-lock")["owner"])
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise UnreadableError(f"{path} names no owner") from error


def touch(path: Path) -> None:
    """A sign of life, for those who cannot ask."""
    with contextlib.suppress(OSError):
        os.utime(path)


def stale(path: Path, job_ended: Callable[[str], bool] = lambda _: False) -> bool:
    """Whether the owner is certainly gone. A lock that cannot be read counts as new for a while:
    its writer replaced it in one step, so something else happened to it."""
    try:
        owner = holder(path)
    except ValueError:
        return _age(path) > STALE_SECONDS
    if owner is None:
        return True
    alive = owner.alive()
    if alive is not None:
        return not alive
    if owner.job is not None:
        # Slurm may start the same job again on another node after a node failed.
        return owner.job == me().job or job_ended(owner.job)
    return _age(path) > STALE_SECONDS


def _take(path: Path, what: str, own: Owner, job_ended: Callable[[str], bool]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _guard(path):
        if path.exists() and not stale(path, job_ended):
            owner, since = None, "an unknown time"
            with contextlib.suppress(ValueError):
                owner, since = holder(path), _since(path)
            raise HeldError(what, owner, since, path)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        facts: dict[str, Any] = {"kind": "jali-lock", "version": 1, "what": what, "since": now}
        write_json(path, facts | {"owner": own.to_dict()})
        # Where the file system has no real locks two may have come this far: the last one wins.
        if holder(path) != own:
            raise HeldError(what, holder(path), _since(path), path)


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Only one process at a time looks at the lock and changes it."""
    handle = os.open(path.with_name(f".{path.name}.guard"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # Some network file systems have no such locks. The file itself still says who has it.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _since(path: Path) -> str:
    return str(read_json(path).get("since"))


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
