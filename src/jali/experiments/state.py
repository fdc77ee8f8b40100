"""Where an experiment stands, in a file that anyone may read while it runs."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from jali.experiments.lock import Owner, me, now, touch
from jali.files import UnreadableError, read_json, write_json

KIND = "jali-state"
BEAT_SECONDS = 20.0
WRITE_SECONDS = 0.5
STATES = ("running", "done", "failed", "stopped")
COMPLETE = ("done", "kept", "none")  # kept from before; none: there was nothing to do


def _now() -> str:
    return now("milliseconds")


@dataclass(kw_only=True)
class State:
    """`state.json`: who works on which stage, how far it is, and how it ended."""

    attempt: int
    stages: dict[str, str]  # by name: waiting, running, done, kept, none, failed or stopped
    owner: Owner = field(default_factory=me)
    state: str = "running"
    stage: str | None = None
    what: str = ""
    done: int = 0
    total: int = 0
    share: float = 0.0  # of all work, done in this attempt or before
    share_before: float = 0.0
    started: str = field(default_factory=_now)
    updated: str = field(default_factory=_now)
    error: str | None = None

    @property
    def quiet(self) -> float:
        """Seconds since the last sign of life."""
        return time.time() - _seconds(self.updated)

    @property
    def seconds(self) -> float:
        """Of this attempt."""
        return max(0.0, _seconds(self.updated) - _seconds(self.started))

    @property
    def seconds_left(self) -> float | None:
        """At the pace of this attempt; None before there is one."""
        gained = self.share - self.share_before
        return None if gained <= 0 else self.seconds * (1 - self.share) / gained

    @classmethod
    def read(cls, path: Path) -> State | None:
        """None where nothing ran yet, `UnreadableError` where the file is damaged."""
        try:
            data = read_json(path, KIND)
        except FileNotFoundError:
            return None
        try:
            facts = {f.name: data[f.name] for f in fields(cls)}
            found = cls(**facts | {"owner": Owner.from_dict(facts["owner"])})
            if found.state not in STATES or not isinstance(found.stages, dict):
                raise ValueError(f"its state is {found.state!r}")
            _ = found.seconds_left, found.quiet, found.attempt + found.done + found.total
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableError(f"{path} is not a {KIND} file: {error!r}") from error
        return found


class StateWriter:
    """Writes `state.json`: at every change of stage, and at most twice a second in between.

    `weights` are the stages in order, each with its share of the work in any unit. A thread
    renews the file and touches the lock while a long step is under way, so that an old file means
    that nobody is writing it.
    """

    def __init__(self, path: Path, lock: Path, weights: Mapping[str, float], attempt: int) -> None:
        self.path, self.lock = path, lock
        self.state = State(attempt=attempt, stages=dict.fromkeys(weights, "waiting"))
        whole = sum(weights.values()) or 1.0
        self._weights = {stage: weight / whole for stage, weight in weights.items()}
        self._written = 0.0
        self._guard = threading.Lock()

    def enter(self, stage: str, why: str) -> None:
        self.state.stages[stage] = "running"
        self._change(stage=stage, what=why, done=0, total=0)

    def leave(self, stage: str, how: str) -> None:
        """how: done, kept or none."""
        self.state.stages[stage] = how
        if how == "kept":
            self.state.share_before = round(self.state.share_before + self._weights[stage], 6)
        self._change(done=0, total=0)

    def progress(self, done: int, total: int, what: str = "") -> bool:
        """Returns whether it was time to write."""
        due = time.monotonic() - self._written >= WRITE_SECONDS
        # How far it is matters less than getting there: a full disk stops the work itself.
        with contextlib.suppress(OSError):
            self._change(write=due, done=done, total=total, what=what)
        return due

    def finish(self, state: str, error: str | None = None) -> None:
        if self.state.stage is not None and state != "done":
            self.state.stages[self.state.stage] = state
        self._change(state=state, error=error)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Renew the file, and touch the lock, while the block runs."""
        end = threading.Event()

        def beat() -> None:
            while not end.wait(BEAT_SECONDS):
                touch(self.lock)
                with contextlib.suppress(OSError):
                    self._change()

        thread = threading.Thread(target=beat, name="jali-state", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _change(self, *, write: bool = True, **facts: Any) -> None:
        with self._guard:
            for name, value in facts.items():
                setattr(self.state, name, value)
            if not write:
                return
            state, weights = self.state, self._weights
            share = sum(weights[s] for s, how in state.stages.items() if how in COMPLETE)
            if state.stage and state.stages[state.stage] not in COMPLETE and state.total:
                share += weights[state.stage] * state.done / state.total
            state.share, state.updated = round(min(1.0, share), 6), _now()
            write_json(self.path, {"kind": KIND, "version": 1, **asdict(state)})
            self._written = time.monotonic()


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
