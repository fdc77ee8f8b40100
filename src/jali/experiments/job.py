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
from jali.experiments.lock import Owner, hold
from jali.experiments.results import Results
from jali.experiments.slurm import job_ended
from jali.experiments.stage import Stage, StageContext, run_stage, why_again
from jali.experiments.state import State, StateWriter
from jali.files import UnreadableError, read_json, write_json

log = logging.getLogger("jali")
CONFIG = "jali-experiment"
OnProgress = Callable[[str, int, int, str], None]  # (stage, done, total, what)


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
    on_progress: OnProgress | None = None,
    track: str | None = None,
) -> Path:
    """Every stage that is not complete, in order; returns the folder with the results.

    A stage is kept if its inputs are the same and its outputs are, to the byte, what it wrote.
    Another experiment under the same tag is refused (`OtherSettingsError`) unless `overwrite`,
    which redoes what differs. Where another process works on the tag it is `HeldError`.

    >>> experiment = Experiment(tag="first", model="nano", steps=4, num_prompts=1).completed()
    >>> run_experiment(experiment, Results("results", "logs"), all_stages())  # doctest: +SKIP
    """
    tag = experiment.tag
    with _ranks(experiment) as agree:
        if not is_first_rank():  # compute along wherever the first rank runs a stage
            shared: dict[str, Any] = {}
            for stage in stages:
                if agree(False):
                    context = StageContext(
                        experiment, results.folder(tag), lambda *_: None, writes=False,
                        shared=shared,
                    )  # fmt: skip
                    stage.run(context)
            return results.folder(tag)
        with hold(results.lock(tag), f"the experiment {tag}", job_ended=job_ended):
            write_config(experiment, results, overwrite=overwrite)
            with log_to(_open_log(results.log(tag))), stop_on_term():
                check_not_cancelled(results, tag, begin=True)
                _run_stages(experiment, results, stages, agree, on_progress)
            if track is not None:
                from jali.experiments.track import send

                send(track, results, tag)
    return results.folder(tag)


def _run_stages(
    experiment: Experiment,
    results: Results,
    stages: Sequence[Stage],
    agree: Callable[[bool], bool],
    on_progress: OnProgress | None,
) -> None:
    tag, shared = experiment.tag, dict[str, Any]()
    weights = {s.name: 0.0 if s.needless(experiment) else s.weight(experiment) for s in stages}
    writer = StateWriter(results.state(tag), results.lock(tag), weights, _attempt(results, tag))
    log.info("%s: attempt %d by %s", tag, writer.state.attempt, writer.state.owner)

    def run(stage: Stage) -> str:
        """How it came to be complete."""
        nothing = stage.needless(experiment)
        why = "" if nothing else why_again(stage, experiment, results)
        agree(bool(why))
        if not why:
            log.info("%s: %s", stage.name, nothing or "its inputs and outputs are unchanged; kept")
            return "none" if nothing else "kept"
        log.info("%s: %s", stage.name, why)
        writer.enter(stage.name, why)

        def progress(done: int, total: int, what: str = "") -> None:
            if writer.progress(done, total, what):
                check_not_cancelled(results, tag)
            if on_progress is not None:
                on_progress(stage.name, done, total, what)

        context = StageContext(experiment, results.folder(tag), progress, shared=shared)
        log.info("%s: done in %.1f s", stage.name, run_stage(stage, context, results))
        return "done"

    try:
        with writer.beating():
            for stage in stages:
                writer.leave(stage.name, run(stage))
            writer.finish("done")
        log.info("%s: done", tag)
    except BaseException as error:
        state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
        log.error("%s: %s in %s: %s", tag, state, writer.state.stage, sentence(error))
        log.debug("%s", traceback.format_exc())
        # Where there is no room for this either, the file before it stays: "running", by a
        # process that is gone, which status reports as lost.
        with contextlib.suppress(OSError):
            writer.finish(state, sentence(error))
        raise


def is_written(experiment: Experiment, results: Results, *, overwrite: bool = False) -> bool:
    """Whether `config.json` is there and says the same.

    One of other settings is an `OtherSettingsError`, one that cannot be read an `UnreadableError`,
    unless it may be overwritten.
    """
    path = results.config(experiment.tag)
    try:
        differ = experiment.differences(read_config(path))
    except FileNotFoundError:
        return False
    except UnreadableError:
        if not overwrite:
            raise
        return False
    if differ and not overwrite:
        raise OtherSettingsError(
            f"{path.parent} holds an experiment with other settings ({'; '.join(differ)}); "
            f"choose another tag, or another name for a sweep, or give --overwrite to redo what "
            f"differs"
        )
    return not differ


def write_config(experiment: Experiment, results: Results, *, overwrite: bool = False) -> None:
    """`config.json`; an experiment of other settings under this tag is not replaced unasked."""
    if not is_written(experiment, results, overwrite=overwrite):
        facts = {"kind": CONFIG, "version": 1, "experiment": experiment.to_dict()}
        write_json(results.config(experiment.tag), facts)


def read_config(path: Path) -> Experiment:
    """The experiment of a `config.json`; UnreadableError where it holds none."""
    data = read_json(path, CONFIG)
    try:
        return Experiment.from_dict(data["experiment"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"{path} is not an experiment: {error}") from error


def sentence(error: BaseException) -> str:
    """An error for people, on one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"no space left on the disk{where}; make room, then retry: what is complete is kept"
            )
        if error.filename and error.strerror:
            return f"{error.filename} cannot be used: {error.strerror}"
        return text
    return text if isinstance(error, ValueError | Stopped) else f"{type(error).__name__}: {text}"


def who_cancelled(results: Results, tag: str) -> str:
    """In words; empty where nobody has."""
    try:
        return f"cancelled by {Owner.from_dict(read_json(results.cancelled(tag)).get('owner'))}"
    except FileNotFoundError:
        return ""
    except ValueError:
        return "cancelled"


def check_not_cancelled(results: Results, tag: str, *, begin: bool = False) -> None:
    """A signal may come before there is anyone to hear it: the file is there to be looked at.

    Who starts it by hand begins anew; what was submitted before it was cancelled does not begin.
    """
    if begin and "SUBMITIT_EXECUTOR" not in os.environ:
        results.cancelled(tag).unlink(missing_ok=True)
    elif who := who_cancelled(results, tag):
        raise Stopped(who)


def is_first_rank() -> bool:
    """Whether this process is the one that writes, and talks to people."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _ranks(experiment: Experiment) -> Iterator[Callable[[bool], bool]]:
    """Join the other processes of torchrun; gives what tells all of them the first one's word."""
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if experiment.ranks != running:
        raise ValueError(
            f"the experiment is for {experiment.ranks} processes, and {running} run; start it with "
            f"torchrun --nproc-per-node {experiment.ranks} -m jali experiment run …"
        )
    if running == 1:
        yield lambda decision: decision
        return
    import torch.distributed as dist

    from jali.generation.ranks import join_ranks

    def agree(decision: bool) -> bool:
        said = [decision]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    with join_ranks(experiment.dense_settings):
        yield agree


def _attempt(results: Results, tag: str) -> int:
    try:
        before = State.read(results.state(tag))
    except UnreadableError as error:
        log.warning("%s; counting attempts from one", error)
        return 1
    return 1 if before is None else before.attempt + 1


def _open_log(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


@contextlib.contextmanager
def log_to(handler: logging.Handler) -> Iterator[None]:
    """Everything jali says also goes there, while the block runs."""
    before, raise_on_error = log.level, logging.raiseExceptions
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    logging.raiseExceptions = False  # a full disk
    try:
        yield
    finally:
        logging.raiseExceptions = raise_on_error
        log.removeHandler(handler)
        log.setLevel(before)
        with contextlib.suppress(OSError):
            handler.close()


@contextlib.contextmanager
def stop_on_term() -> Iterator[None]:
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
class Job:
    """An experiment as submitit wants it: a callable that can be pickled and started again.

    Slurm may end it (pre-emption, a lost node, the time limit) and start it anew: it resumes from
    its result files, so a checkpoint is only itself once more.
    """

    experiment: Experiment
    results: Results
    stages: Callable[[], Sequence[Stage]]
    overwrite: bool = False
    track: str | None = None

    @property
    def tag(self) -> str:
        return self.experiment.tag

    def __call__(self) -> str:
        if self.experiment.ranks > 1 and "WORLD_SIZE" not in os.environ:
            self._run_on_ranks()
        else:
            run_experiment(
                self.experiment, self.results, self.stages(), overwrite=self.overwrite,
                track=self.track,
            )  # fmt: skip
        return str(self.results.folder(self.tag))

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(self)

    def _run_on_ranks(self) -> None:
        """Several GPUs: torchrun starts one process for each, inside this one's allocation."""
        import subprocess

        write_config(self.experiment, self.results, overwrite=self.overwrite)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={self.experiment.ranks}", "-m", "jali", "experiment", "run",
            "--config", str(self.results.config(self.tag)),
            "--results", str(self.results.root), "--logs-dir", str(self.results.logs),
            *(["--track", self.track] if self.track is not None else []),
        ]  # fmt: skip
        subprocess.run(command, check=True)
