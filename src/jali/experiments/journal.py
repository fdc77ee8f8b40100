"""Where an experiment stands, in a file that anyone may read while it runs."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jali.experiments import lock
from jali.experiments.owner import Owner, me
from jali.experiments.storage import UnreadableError, read_json, write_json

KIND = "jali-state"
BEAT_SECONDS = 20.0
WRITE_SECONDS = 0.5
STATES = ("running", "done", "failed", "stopped")
COMPLETE = ("done", "kept", "none")


@dataclass(frozen=True, slots=True)
class Entry:
    """`state.json`, read."""

    state: str
    owner: Owner
    attempt: int
    stage: str | None
    what: str
    done: int
    total: int
    stages: dict[str, str]
    share: float
    share_before: float
    started: float
    updated: float
    error: str | None

    @property
    def seconds(self) -> float:
        """Of this attempt."""
        return max(0.0, self.updated - self.started)

    @property
    def seconds_left(self) -> float | None:
        """At the pace of this attempt; None before there is one."""
        gained = self.share - self.share_before
        return None if gained <= 0 else self.seconds * (1 - self.share) / gained

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """None where nothing ran yet."""
        try:
            data = read_json(path, KIND)
        except FileNotFoundError:
            return None
        try:
            if data["state"] not in STATES:
                raise ValueError(f"its state is {data['state']!r}")
            return cls(
                state=data["state"],
                owner=Owner.from_dict(data["owner"]),
                attempt=int(data["attempt"]),
                stage=data["stage"],
                what=str(data["what"]),
                done=int(data["done"]),
                total=int(data["total"]),
                stages={str(k): str(v) for k, v in data["stages"].items()},
                share=float(data["share"]),
                share_before=float(data["share_before"]),
                started=_seconds(data["started"]),
                updated=_seconds(data["updated"]),
                error=data["error"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableError(f"{path} is not a {KIND} file: {error!r}") from error


@dataclass
class Journal:
    """Writes `state.json`: at every change of stage, and at most twice a second in between.

    `weights` are the stages in order, each with its share of the work in any unit. What a reader
    needs is never more than a moment old: a thread renews the file while a long step is under
    way, so that an old file means that nobody is writing it.
    """

    path: Path
    lock_path: Path
    weights: Mapping[str, float]
    attempt: int
    state: str = "running"
    stage: str | None = None
    what: str = ""
    done: int = 0
    total: int = 0
    error: str | None = None
    stages: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stages = dict.fromkeys(self.weights, "waiting")
        self.owner = me()
        self._began = _now()
        self._before = 0.0
        self._written = 0.0
        self._guard = threading.Lock()
        self._end = threading.Event()

    def enter(self, stage: str, why: str) -> None:
        self.stage, self.what, self.done, self.total = stage, why, 0, 0
        self.stages[stage] = "running"
        self.write()

    def leave(self, stage: str, how: str) -> None:
        """how: done, kept (from before) or none (nothing to do)."""
        self.stages[stage] = how
        self.done = self.total = 0
        if how == "kept":
            self._before += self._weight(stage)
        self.write()

    @property
    def share(self) -> float:
        """Of all work, done in this attempt or before."""
        complete = sum(self._weight(s) for s, how in self.stages.items() if how in COMPLETE)
        if self.stage is not None and self.stages[self.stage] not in COMPLETE and self.total:
            complete += self._weight(self.stage) * self.done / self.total
        return round(min(1.0, complete), 6)

    def _weight(self, stage: str) -> float:
        # What there is nothing to do for weighs nothing.
        weights = {s: w for s, w in self.weights.items() if self.stages[s] != "none"}
        return weights.get(stage, 0.0) / (sum(weights.values()) or 1.0)

    def progress(self, done: int, total: int, what: str = "") -> None:
        self.done, self.total, self.what = done, total, what
        if time.monotonic() - self._written >= WRITE_SECONDS:
            # How far it is matters less than getting there: a full disk stops the work itself.
            with contextlib.suppress(OSError):
                self.write(durable=False)

    def finish(self, state: str, error: str | None = None) -> None:
        self.state, self.error = state, error
        if self.stage is not None and state != "done":
            self.stages[self.stage] = state
        self.write()

    def write(self, *, durable: bool = True) -> None:
        with self._guard:
            write_json(self.path, self._facts(), durable=durable)
            self._written = time.monotonic()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Renew the file, and touch the lock, while the block runs."""
        thread = threading.Thread(target=self._beat, name="jali-journal", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _beat(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            lock.touch(self.lock_path)
            with contextlib.suppress(OSError):
                self.write(durable=False)

    def _facts(self) -> dict[str, Any]:
        return {
            "kind": KIND, "version": 1, "state": self.state, "owner": self.owner.to_dict(),
            "attempt": self.attempt, "stage": self.stage, "what": self.what, "done": self.done,
            "total": self.total, "stages": dict(self.stages), "share": self.share,
            "share_before": round(self._before, 6), "started": self._began, "updated": _now(),
            "error": self.error,
        }  # fmt: skip


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
