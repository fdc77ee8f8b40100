"""One experiment from beginning to end, resumed where it died."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.experiments.experiment import Experiment
from jali.experiments.journal import Entry, Journal
from jali.experiments.lock import locked
from jali.experiments.results import Results
from jali.experiments.slurm import job_ended
from jali.experiments.stage import Context, Stage, run_stage, why_again
from jali.experiments.storage import UnreadableError, read_json, write_json
from jali.experiments.team import Team, assembled

log = logging.getLogger("jali")
CONFIG = "jali-experiment"
Told = Callable[[str, int, int, str], None]  # (stage, done, total, what)


class Stopped(BaseException):
    """The job was told to stop; like Ctrl-C, no ordinary handler may swallow it."""


class OtherSettingsError(ValueError):
    """The tag is taken by an experiment with other settings."""


def run_experiment(
    experiment: Experiment,
    results: Results,
    stages: Sequence[Stage],
    *,
    overwrite: bool = False,
    told: Told | None = None,
    track: str | None = None,
) -> Path:
    """Every stage that is not complete, in order; returns the folder with the results.

    A stage is kept if its inputs are the same and its outputs are, to the byte, what it wrote.
    Another experiment under the same tag is refused unless `overwrite`, which redoes what differs.
    """
    tag = experiment.tag
    with assembled(experiment, results) as team:
        if not team.leads:
            _follow(experiment, results, stages, team)
            return results.folder(tag)
        _lead(experiment, results, stages, team, overwrite, told, track)
    return results.folder(tag)


def _lead(
    experiment: Experiment,
    results: Results,
    stages: Sequence[Stage],
    team: Team,
    overwrite: bool,
    told: Told | None,
    track: str | None,
) -> None:
    tag = experiment.tag
    with locked(results.lock(tag), f"the experiment {tag}", job_ended=job_ended):
        write_config(experiment, results, overwrite=overwrite)
        with _logged(results.log(tag)), stopping_on_term():
            weights = {
                s.name: 0.0 if s.needed(experiment) else s.weight(experiment) for s in stages
            }
            journal = Journal(
                results.state(tag), results.lock(tag), weights, _attempt(results, tag)
            )
            log.info("%s: attempt %d by %s", tag, journal.attempt, journal.owner)
            _run(experiment, results, stages, team, journal, told, track)


def _follow(experiment: Experiment, results: Results, stages: Sequence[Stage], team: Team) -> None:
    """Compute along wherever the leader runs a stage; write nothing."""
    shared: dict[str, Any] = {}
    folder = results.folder(experiment.tag)
    for stage in stages:
        if team.agree(None):
            stage.run(Context(experiment, folder, _quiet, writes=False, shared=shared))


def _quiet(done: int, total: int, what: str) -> None:
    """Progress is the leader's to tell."""


def _run(
    experiment: Experiment,
    results: Results,
    stages: Sequence[Stage],
    team: Team,
    journal: Journal,
    told: Told | None,
    track: str | None,
) -> None:
    try:
        with journal.beating():
            _stages(experiment, results, stages, team, journal, told)
            journal.finish("done")
        log.info("%s: done", experiment.tag)
    except BaseException as error:
        state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
        log.error("%s: %s in %s: %s", experiment.tag, state, journal.stage, sentence(error))
        log.debug("%s", traceback.format_exc())
        # Where there is no room for this either, the file before it stays: "running", by a
        # process that is gone, which status reports as lost.
        with contextlib.suppress(OSError):
            journal.finish(state, sentence(error))
        raise
    if track is not None:
        from jali.experiments.track import send

        send(track, results, experiment.tag)


def _stages(
    experiment: Experiment,
    results: Results,
    stages: Sequence[Stage],
    team: Team,
    journal: Journal,
    told: Told | None,
) -> None:
    shared: dict[str, Any] = {}
    for stage in stages:
        nothing = stage.needed(experiment)
        why = "" if nothing else why_again(stage, experiment, results)
        team.agree(bool(why))
        if nothing:
            log.info("%s: nothing to do (%s)", stage.name, nothing)
            journal.leave(stage.name, "none")
            continue
        if not why:
            log.info("%s: kept, its inputs and outputs are unchanged", stage.name)
            journal.leave(stage.name, "kept")
            continue
        log.info("%s: %s", stage.name, why)
        journal.enter(stage.name, why)

        def progress(done: int, total: int, what: str = "", name: str = stage.name) -> None:
            journal.progress(done, total, what)
            if told is not None:
                told(name, done, total, what)

        context = Context(experiment, results.folder(experiment.tag), progress, shared=shared)
        seconds = run_stage(stage, context, results)
        log.info("%s: done in %.1f s", stage.name, seconds)
        journal.leave(stage.name, "done")


def write_config(experiment: Experiment, results: Results, *, overwrite: bool = False) -> None:
    """`config.json`; an experiment of other settings under this tag is not replaced unasked."""
    path = results.config(experiment.tag)
    with contextlib.suppress(FileNotFoundError):
        try:
            differ = experiment.differences(read_config(results, experiment.tag))
        except UnreadableError:
            if not overwrite:
                raise
            differ = ["unreadable"]
        if not differ:
            return
        if not overwrite:
            raise OtherSettingsError(
                f"{path.parent} holds an experiment with other settings ({'; '.join(differ)}); "
                f"choose another tag, or give --overwrite to redo what differs"
            )
    write_json(path, {"kind": CONFIG, "version": 1, "experiment": experiment.to_dict()})


def read_config(results: Results, tag: str) -> Experiment:
    """FileNotFoundError where there is no such experiment, UnreadableError where it is damaged."""
    return experiment_in(results.config(tag))


def experiment_in(path: Path) -> Experiment:
    """The experiment of a configuration file; the same errors."""
    data = read_json(path, CONFIG)
    try:
        return Experiment.from_dict(data["experiment"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"{path} is not an experiment: {error}") from error


def sentence(error: BaseException) -> str:
    """An error for people, on one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"no space left on the disk{where}; make room, then retry: what is complete is kept"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | Stopped) else f"{type(error).__name__}: {text}"


def _attempt(results: Results, tag: str) -> int:
    try:
        before = Entry.read(results.state(tag))
    except UnreadableError as error:
        log.warning("%s; counting attempts from one", error)
        return 1
    return 1 if before is None else before.attempt + 1


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Everything jali says also goes to the experiment's log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if before == logging.NOTSET else min(before, logging.DEBUG))
    raise_on_error, logging.raiseExceptions = logging.raiseExceptions, False  # a full disk
    try:
        yield
    finally:
        logging.raiseExceptions = raise_on_error
        log.removeHandler(handler)
        log.setLevel(before)
        with contextlib.suppress(OSError):
            handler.close()


@contextlib.contextmanager
def stopping_on_term() -> Iterator[None]:
    """SIGTERM (scancel, pre-emption, `jali experiment cancel`) stops in order, at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:  # noqa: ARG001
        raise Stopped("told to stop (SIGTERM)")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


@dataclass(frozen=True)
class Task:
    """An experiment as submitit wants it: a callable that can be pickled and started again.

    Slurm may end it (pre-emption, a lost node, the time limit) and start it anew: it resumes from
    its result files, so a checkpoint is only itself once more.
    """

    experiment: Experiment
    results: Results
    stages: Callable[[], Sequence[Stage]]
    overwrite: bool = False
    track: str | None = None

    def __call__(self) -> str:
        if self.experiment.ranks > 1 and "WORLD_SIZE" not in os.environ:
            return self._on_ranks()
        folder = run_experiment(
            self.experiment, self.results, self.stages(), overwrite=self.overwrite, track=self.track
        )
        return str(folder)

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _on_ranks(self) -> str:
        """Several GPUs: torchrun starts one process for each, inside this one's allocation."""
        import subprocess

        write_config(self.experiment, self.results, overwrite=self.overwrite)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={self.experiment.ranks}", "-m", "jali", "experiment", "run",
            "--config", str(self.results.config(self.experiment.tag)),
            "--results", str(self.results.root), "--logs-dir", str(self.results.logs),
        ]  # fmt: skip
        if self.track is not None:
            command += ["--track", self.track]
        subprocess.run(command, check=True)
        return str(self.results.folder(self.experiment.tag))
