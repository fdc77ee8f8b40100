"""A stage, and what is remembered of it: skipped only if inputs and outputs are what they were."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from jali.experiments.experiment import Experiment
from jali.experiments.results import Results
from jali.files import UnreadableError, digest, file_digest, read_json, write_json

log = logging.getLogger("jali")
KIND = "jali-stage"
Progress = Callable[[int, int, str], None]  # (done, total, what): units are the stage's own


@dataclass(frozen=True, slots=True)
class StageContext:
    """What a stage gets: the experiment, where its files go, and whom to tell how far it is.

    `resuming` says that what an earlier attempt left half-done has the same inputs as this one.
    `shared` is passed along the stages of one run, for what is slow to load. Of several ranks that
    work on one experiment only the one that `writes` does.
    """

    experiment: Experiment
    folder: Path
    progress: Progress
    resuming: bool = False
    writes: bool = True
    shared: dict[str, Any] = field(default_factory=dict)


class Stage(Protocol):
    """One part of an experiment. It resumes by itself from whatever it left in the folder."""

    @property
    def name(self) -> str: ...

    def needless(self, experiment: Experiment) -> str:  # noqa: ARG002
        """Why there is nothing to do, in words; empty where there is."""
        return ""

    def weight(self, experiment: Experiment) -> float:
        """How much work it is, in steps of dense generation: for the time that is left."""
        ...

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        """Everything that decides the outputs, as JSON: settings, and digests of files it reads."""
        ...

    def run(self, context: StageContext) -> Sequence[Path]:
        """Do it; returns the files it made."""
        ...


def inputs_digest(stage: Stage, experiment: Experiment, folder: Path) -> str:
    from jali import __version__

    return digest({"jali": __version__, "stage": stage.name, **stage.inputs(experiment, folder)})


def why_again(stage: Stage, experiment: Experiment, results: Results) -> str:
    """Why a stage has to run, in words; empty where its outputs are complete and its inputs the
    same, to the byte."""
    folder = results.folder(experiment.tag)
    try:
        inputs, outputs = read_record(results, experiment.tag, stage.name)
    except FileNotFoundError:
        return "not done yet"
    except UnreadableError as error:
        return str(error)
    if inputs != inputs_digest(stage, experiment, folder):
        return "its inputs have changed"
    return next((why for name in outputs if (why := damage(folder, name, outputs))), "")


def damage(folder: Path, name: str, outputs: Mapping[str, str]) -> str:
    """Why an output is not what it was, in words; empty where it is."""
    try:
        same = file_digest(folder / name) == outputs.get(name)
    except FileNotFoundError:
        return f"{folder / name} is missing"
    except OSError as error:
        return f"{folder / name} cannot be read: {error.strerror}"
    return "" if same else f"{folder / name} is not what the stage wrote"


def run_stage(stage: Stage, context: StageContext, results: Results) -> float:
    """Run it, and remember what it read and made; returns seconds."""
    experiment, folder = context.experiment, context.folder
    record = results.record(experiment.tag, stage.name)
    inputs = inputs_digest(stage, experiment, folder)
    _discard_damaged(results, experiment.tag, stage.name, inputs)
    record.unlink(missing_ok=True)  # from here on its outputs are in flux
    # The inputs of a stage that was begun, so that another attempt knows what lies there.
    begun = record.with_suffix(".begun.json")
    with contextlib.suppress(FileNotFoundError, UnreadableError):
        context = replace(context, resuming=read_json(begun).get("inputs") == inputs)
    write_json(begun, {"inputs": inputs})
    began = time.monotonic()
    files = stage.run(context)
    seconds = time.monotonic() - began
    outputs = {str(path.relative_to(folder)): file_digest(path) for path in sorted(files)}
    facts = {"kind": KIND, "version": 1, "stage": stage.name, "inputs": inputs}
    write_json(record, facts | {"outputs": outputs, "seconds": round(seconds, 3)})
    return seconds


def _discard_damaged(results: Results, tag: str, stage: str, inputs: str) -> None:
    """Outputs that are not what the stage wrote would be taken for finished work; they go."""
    try:
        known, outputs = read_record(results, tag, stage)
    except (OSError, UnreadableError):
        return
    folder = results.folder(tag)
    for name in outputs if known == inputs else ():
        if (folder / name).is_file() and (why := damage(folder, name, outputs)):
            log.warning("%s; it is made again", why)
            (folder / name).unlink()


def read_record(results: Results, tag: str, stage: str) -> tuple[str, dict[str, str]]:
    """(inputs, outputs) of a complete stage; FileNotFoundError or UnreadableError else."""
    path = results.record(tag, stage)
    record = read_json(path, KIND)
    outputs = record.get("outputs")
    if not isinstance(outputs, dict) or not all(
        isinstance(value, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
        for name, value in outputs.items()
    ):
        raise UnreadableError(f"{path} lists no outputs")
    return str(record.get("inputs")), outputs
